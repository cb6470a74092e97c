"""`Spool` has the files of segments that are built and of attempts that have not ended.

At the start it removes the files of segments that a crashed process was building. Disk use is bounded: while the kept
segments have `max_bytes`, no build begins (`is_full`). A bounded thread pool does the file work.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from uuid import UUID, uuid4

from tiers.errors import RemoteLogError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.copy.kept_segments import KeptSegment, keep_segment, kept_segments

Result = TypeVar("Result")
_SUFFIX = ".spool"


class SpoolError(RemoteLogError):
    """An error of the disk, for example a full one. What was written before stays as it is."""

    retriable = True


class Spool:
    def __init__(self, folder: Path, max_bytes: int, threads: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="spool")
        self._kept: dict[TopicIdPartition, dict[UUID, KeptSegment]] = defaultdict(dict)

    @property
    def used_bytes(self) -> int:
        """The size of the kept segments."""
        return sum(kept.size_bytes for kept in self.kept())

    @property
    def is_full(self) -> bool:
        return self.used_bytes >= self._max_bytes

    async def open(self) -> None:
        """Creates the folder, and finds the segments that an earlier process kept. Removes what it was building.

        The folder belongs to this process alone."""
        await self.run(self._find)

    def _find(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"*{_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        for kept in kept_segments(self._folder):
            self._kept[kept.partition][kept.metadata.segment_id.id] = kept

    async def room_bytes(self) -> int:
        """Returns the size of a segment for which the disk has room, with its indexes and a sealed copy."""
        return (await self.run(lambda: shutil.disk_usage(self._folder))).free // 3

    def new_path(self, partition: TopicIdPartition) -> Path:
        return self._folder / f"{partition.topic_id}-{partition.partition}-{uuid4()}{_SUFFIX}"

    async def keep(self, segment: RemoteLogSegmentMetadata, built: BuiltSegment, key_ring: KeyRing) -> KeptSegment:
        """Keeps a built segment for the attempt `segment`, which is COPY_SEGMENT_STARTED: see `keep_segment`."""

        def keep() -> KeptSegment:
            # Assigned in the thread, so that the spool has the segment also if the caller is cancelled.
            kept = of_partition[segment.segment_id.id] = keep_segment(self._folder, segment, built, key_ring)
            return kept

        of_partition = self._kept[segment.topic_id_partition]
        return await self.run(keep)

    def kept(self) -> list[KeptSegment]:
        """Returns the kept segments of all partitions."""
        return [kept for of_partition in self._kept.copy().values() for kept in of_partition.copy().values()]

    def kept_in(self, partition: TopicIdPartition) -> list[KeptSegment]:
        """Returns the kept segments of a partition, those with the lowest offsets first."""
        of_partition = self._kept.get(partition, {})
        return sorted(of_partition.copy().values(), key=lambda each: each.metadata.start_offset)

    def kept_of(self, attempt: RemoteLogSegmentId) -> KeptSegment | None:
        return self._kept.get(attempt.topic_id_partition, {}).get(attempt.id)

    async def remove(self, kept: KeptSegment) -> None:
        """Removes the files of a kept segment. Removing them twice is no error."""
        await self.run(kept.remove)
        self._kept[kept.partition].pop(kept.metadata.segment_id.id, None)

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
