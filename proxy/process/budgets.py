"""Divides the limits for connections, memory and downloads into equal shares, one for each worker.

The kernel distributes connections over the workers, but not evenly. A share is the most that one worker may use, and a
worker cannot use the idle share of another.

Each process also has a folder of its own for cached chunks of the remote tier: `chunks/<worker>` under `state.path`. If
the number of workers was reduced or the cache was switched off, the folders of former processes remain, and no share
counts their bytes. The next start deletes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from proxy.config import TidegateConfig


def share_of(config: TidegateConfig) -> TidegateConfig:
    """Returns the settings of one of `config.workers` workers. All workers bind the same ports."""
    workers = config.workers

    def part(total: int) -> int:
        """Rounds up, so that a limit never becomes 0."""
        return -(-total // workers)

    def part_of_limit(total: int | None) -> int | None:
        return None if total is None else part(total)

    limits, remote_log = config.limits, config.remote_log
    return config.model_copy(
        update={
            "workers": 0,
            "listener": config.listener.model_copy(update={"reuse_port": True}),
            "topics": tuple(
                topic.model_copy(update={"fetch_max_bytes_per_second": part_of_limit(topic.fetch_max_bytes_per_second)})
                for topic in config.topics
            ),
            "limits": limits.model_copy(
                update={
                    "max_connections": part(limits.max_connections),
                    "max_connections_per_address": part(limits.max_connections_per_address),
                    "max_unauthenticated_connections_per_address": part(
                        limits.max_unauthenticated_connections_per_address
                    ),
                    "max_held_remote_bytes": part(limits.max_held_remote_bytes),
                    "remote_fetch_max_bytes_per_second": part_of_limit(limits.remote_fetch_max_bytes_per_second),
                }
            ),
            "remote_log": remote_log.model_copy(
                update={
                    "fetch_max_bytes_per_second": part_of_limit(remote_log.fetch_max_bytes_per_second),
                    "reader_threads": part(remote_log.reader_threads),
                    "reader_max_pending_tasks": part(remote_log.reader_max_pending_tasks),
                    "reader_max_bytes_in_flight": part(remote_log.reader_max_bytes_in_flight),
                    "read_ahead_bytes": part(remote_log.read_ahead_bytes),
                    "chunk_cache_bytes": part(remote_log.chunk_cache_bytes),
                    "chunk_file_cache_bytes": part(remote_log.chunk_file_cache_bytes),
                    "index_cache_bytes": part(remote_log.index_cache_bytes),
                    # The other half is the share of the remote-log process, whose files the workers read.
                    "index_file_cache_bytes": part(
                        remote_log.index_file_cache_bytes - _remote_log_index_file_bytes(config)
                    ),
                }
            ),
        }
    )


def remote_log_share_of(config: TidegateConfig) -> TidegateConfig:
    """Returns the settings of the remote-log process beside the workers."""
    files = {"index_file_cache_bytes": _remote_log_index_file_bytes(config)}
    return config.model_copy(update={"remote_log": config.remote_log.model_copy(update=files)})


def _remote_log_index_file_bytes(config: TidegateConfig) -> int:
    return config.remote_log.index_file_cache_bytes // 2


def chunk_folder(config: TidegateConfig, worker: str | None) -> Path:
    """Returns the folder of `worker`. None stands for the only process of a proxy without workers."""
    return config.state.path / "chunks" / (worker or "whole")


def remove_other_chunk_folders(config: TidegateConfig, workers: Iterable[str | None]) -> None:
    """Deletes all chunk folders except those of `workers`. If the cache is switched off, deletes all of them.

    Call this before any of the workers starts. Blocks on file I/O."""
    is_on = config.remote_log.chunk_file_cache_bytes > 0
    kept = {chunk_folder(config, worker) for worker in workers} if is_on else set()
    for folder in (config.state.path / "chunks").glob("*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
