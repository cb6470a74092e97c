"""The folders of the local index files of a proxy (docs/founding.md, "Local index files").

<state.path>/index             written by the process that runs the RLM tasks, read by every process
<state.path>/index-<process>   indexes that the remote reader read from the store: segments that another proxy copied
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from proxy.config import TidegateConfig
from tiers.access.open_tier import open_key_ring
from tiers.broker.client import monotonic_ms
from tiers.reader.local_index_cache import LocalIndexes


async def writer_of_local_indexes(stack: AsyncExitStack, config: TidegateConfig) -> LocalIndexes | None:
    """Returns the index files of the process that runs the RLM tasks; None if they are switched off.

    The stack closes them."""
    max_bytes = config.remote_log.index_file_cache_bytes
    if not max_bytes:
        return None
    indexes = LocalIndexes(_shared(config), max_bytes, monotonic_ms, open_key_ring(config))
    stack.callback(indexes.close)
    await indexes.open()
    return indexes


def local_indexes_of_reader(config: TidegateConfig, process: str) -> LocalIndexes | None:
    """Returns the index files that the remote reader reads; None if they are switched off."""
    max_bytes = config.remote_log.index_file_cache_bytes
    if not max_bytes:
        return None
    own = config.state.path / f"index-{process}"
    return LocalIndexes(own, max_bytes, monotonic_ms, open_key_ring(config), shared=_shared(config))


def _shared(config: TidegateConfig) -> Path:
    return config.state.path / "index"
