"""`Spool` keeps the files of segments being built. At the start it removes the files of a crashed process.

Disk use is bounded: above `max_bytes`, copiers finish the segments that they have, however small (`is_full`). A bounded
thread pool does the file work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition

Result = TypeVar("Result")
_SUFFIX = ".spool"


class SpoolError(RemoteLogError):
    """An error of the disk, for example a full one. The file being written can only be discarded."""

    retriable = True


class Spool:
    def __init__(self, folder: Path, max_bytes: int, threads: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="spool")

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def is_full(self) -> bool:
        return self._used_bytes >= self._max_bytes

    async def open(self) -> None:
        """Creates the folder and removes the spool files in it. The folder belongs to this process alone."""
        await self.run(self._empty)

    def _empty(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"*{_SUFFIX}"):
            leftover.unlink(missing_ok=True)

    def new_path(self, partition: TopicIdPartition) -> Path:
        return self._folder / f"{partition.topic_id}-{partition.partition}-{uuid4()}{_SUFFIX}"

    def grow(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        self._used_bytes -= size_bytes

    async def run(self, work: Callable[[], Result]) -> Result:
        """Runs blocking file work in a thread. Raises `SpoolError` for an `OSError`.

        A cancelled caller waits until the work has ended, even if it is cancelled again. Then it can undo the work."""
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(working)
        except OSError as error:
            raise SpoolError(f"the spool in {self._folder} cannot be used: {error}") from error
        except asyncio.CancelledError:
            while not working.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([working])
            if not working.cancelled():
                working.exception()
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
