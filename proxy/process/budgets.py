"""Divides the limits for connections and memory into equal shares, one for each worker.

The kernel distributes connections over the workers, but not evenly. A share is the most that one worker may use, and a
worker cannot use the idle share of another. One process reads the remote tier for all workers. So the limits of
downloads, caches and quotas are not divided.

That process has a folder for cached chunks of the remote tier: `chunks/<process>` under `state.path`. If the cache was
switched off, or a process of another name had a folder, it remains, and no limit counts its bytes. The next start
deletes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from proxy.config import TidegateConfig


def share_of(config: TidegateConfig) -> TidegateConfig:
    """Returns the settings of one of the workers."""

    def part(total: int) -> int:
        """Rounds up, so that a limit never becomes 0."""
        return -(-total // config.worker_count)

    limits = config.limits
    per_address = limits.max_connections_per_address
    return config.model_copy(
        update={
            "limits": limits.model_copy(
                update={
                    "max_connections": part(limits.max_connections),
                    "max_connections_per_address": None if per_address is None else part(per_address),
                    "max_unauthenticated_connections_per_address": part(
                        limits.max_unauthenticated_connections_per_address
                    ),
                    "max_decoded_bytes": part(limits.max_decoded_bytes),
                }
            ),
        }
    )


def remote_log_share_of(config: TidegateConfig) -> TidegateConfig:
    """Returns the settings of the remote-log process beside the workers."""
    files = {"index_file_cache_bytes": _remote_log_index_file_bytes(config)}
    return config.model_copy(update={"remote_log": config.remote_log.model_copy(update=files)})


def reader_share_of(config: TidegateConfig) -> TidegateConfig:
    """Returns the settings of the remote reader beside the workers."""
    remote_log = config.remote_log
    # The other half is the share of the remote-log process, whose files the reader reads too.
    files = {"index_file_cache_bytes": remote_log.index_file_cache_bytes - _remote_log_index_file_bytes(config)}
    return config.model_copy(update={"remote_log": remote_log.model_copy(update=files)})


def _remote_log_index_file_bytes(config: TidegateConfig) -> int:
    return config.remote_log.index_file_cache_bytes // 2


def chunk_folder(config: TidegateConfig, process: str) -> Path:
    return config.state.path / "chunks" / process


def remove_other_chunk_folders(config: TidegateConfig, processes: Iterable[str]) -> None:
    """Deletes all chunk folders except those of `processes`. If the cache is switched off, deletes all of them.

    Call this before any of the processes starts. Blocks on file I/O."""
    is_on = config.remote_log.chunk_file_cache_bytes > 0
    kept = {chunk_folder(config, process) for process in processes} if is_on else set()
    for folder in (config.state.path / "chunks").glob("*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
