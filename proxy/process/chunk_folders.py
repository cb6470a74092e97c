"""The folder of each process for cached chunks of the remote tier: `chunks/<worker>` under `state.path`.

Every process has a folder of its own and its share of the bytes. If the number of workers was reduced or the cache was
switched off, folders of former processes remain, and no share counts their bytes. They are deleted at the next start.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from proxy.config import TidegateConfig


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
