"""Which process keeps chunks of the remote tier in which folder: `chunks/<worker>` under `state.path`.

Every process has a folder of its own and its share of the bytes. What processes had that are no more, since there are
fewer workers now or the cache was switched off, counts in nobody's share: it goes when the whole starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from proxy.config import TidegateConfig


def chunk_folder(config: TidegateConfig, worker: str | None) -> Path:
    """`worker` None: of the one process that does everything."""
    return config.state.path / "chunks" / (worker or "whole")


def remove_other_chunk_folders(config: TidegateConfig, workers: Iterable[str | None]) -> None:
    """All but those of `workers`; with the cache switched off, all. To be called before any of them starts. Blocks."""
    is_on = config.remote_log.chunk_file_cache_bytes > 0
    kept = {chunk_folder(config, worker) for worker in workers} if is_on else set()
    for folder in (config.state.path / "chunks").glob("*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
