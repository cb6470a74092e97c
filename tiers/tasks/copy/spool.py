"""`Spool` has the segments that are built, and whose copies have not ended (docs/design.md, "Attempts").

A kept segment is two files, as the store gets them, encrypted if segments are. They stay until the copy counts, and a
restart finds them again. The `.indexes` file has a checksum of every chunk of the `.log` file. While the kept segments
have `max_bytes`, no build begins (`is_full`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import UUID, uuid4

from protocol.records.record_batch import crc32c
from tiers.durable_folders import create_folder, sync_folder
from tiers.errors import CorruptSegmentError, RemoteLogError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import KeyRing, seal_segment, unsealed_segment
from tiers.storage.object_key import INDEXES_SUFFIX, LOG_SUFFIX
from tiers.storage.remote_storage_manager import LogSegmentData

Result = TypeVar("Result")
_BUILDING, _SEALING = ".spool", ".part"
"""The suffixes of files that are not complete."""
logger = logging.getLogger(__name__)


class SpoolError(RemoteLogError):
    """An error of the disk, for example a full one. What was written before stays as it is."""

    retriable = True


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """`metadata` is that of the attempt, in COPY_SEGMENT_STARTED. `size_bytes` is the size of the `.log` file.

    The methods block on the disk, and raise `OSError`."""

    metadata: RemoteLogSegmentMetadata
    log: Path
    size_bytes: int

    @property
    def partition(self) -> TopicIdPartition:
        return self.metadata.topic_id_partition

    @property
    def indexes(self) -> Path:
        return self.log.with_suffix(INDEXES_SUFFIX)

    def data(self) -> LogSegmentData:
        return LogSegmentData(self.log, self.indexes.read_bytes())

    def opened(self, ciphers: SegmentCiphers, path: Path) -> BuiltSegment:
        """Returns the segment without encryption, with its log in the new file `path`, for an attempt of another uuid.

        Raises `CorruptSegmentError` when the files are damaged, and `EncryptionKeyError`."""
        decoded = decode_indexes_object(self.indexes.read_bytes(), self.metadata)
        return unsealed_segment(decoded, self.log, ciphers, path)

    def is_intact(self, ciphers: SegmentCiphers) -> bool:
        """Returns whether the files have the bytes that were written."""
        try:
            index = decode_indexes_object(self.indexes.read_bytes(), self.metadata).remote_log_index(ciphers)
            with self.log.open("rb") as file:
                for number, chunk in enumerate(index.chunks()):
                    piece = index.open_chunk(number, memoryview(file.read(chunk.stored_bytes)))
                    if crc32c(piece, 0, len(piece)) != chunk.crc32c:
                        return False
        except (CorruptSegmentError, FileNotFoundError):
            return False
        return True

    def remove(self) -> None:
        self.indexes.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)


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
        """Creates the folder, and finds the segments that an earlier process kept. Removes what is not complete.

        The folder belongs to this process alone. Files that this release cannot read stay."""
        await self.run(self._find)

    def _find(self) -> None:
        folder = self._folder
        create_folder(folder)
        for leftover in (*folder.glob(f"*{_BUILDING}"), *folder.glob(f"*{_SEALING}")):
            leftover.unlink(missing_ok=True)
        for log in folder.glob(f"*{LOG_SUFFIX}"):
            indexes = log.with_suffix(INDEXES_SUFFIX)
            if not indexes.exists():  # it is removed first
                log.unlink()
                continue
            try:
                metadata = decode_indexes_object(indexes.read_bytes()).metadata
            except CorruptSegmentError as error:
                fields = {"path": str(log), "error": str(error)}
                logger.error("a segment in the spool cannot be read: it stays there", extra=fields)
            else:
                kept = KeptSegment(metadata, log, log.stat().st_size)
                self._kept[kept.partition][metadata.segment_id.id] = kept
        for indexes in folder.glob(f"*{INDEXES_SUFFIX}"):
            if not indexes.with_suffix(LOG_SUFFIX).exists():
                indexes.unlink()

    async def room_bytes(self) -> int:
        """Returns the size of a segment for which the disk has room, with its indexes and a sealed copy."""
        return (await self.run(lambda: shutil.disk_usage(self._folder))).free // 3

    def new_path(self, partition: TopicIdPartition) -> Path:
        return self._folder / f"{partition.topic_id}-{partition.partition}-{uuid4()}{_BUILDING}"

    async def keep(self, segment: RemoteLogSegmentMetadata, built: BuiltSegment, key_ring: KeyRing) -> KeptSegment:
        """Makes the two files of the attempt `segment`, which is COPY_SEGMENT_STARTED.

        The file of `built` is one of them from then on, unless it is encrypted: the disk then holds the segment twice
        meanwhile. After a `SpoolError`, `built` is as before."""
        return await self.run(partial(self._keep, segment, built, key_ring))

    def _keep(self, segment: RemoteLogSegmentMetadata, built: BuiltSegment, key_ring: KeyRing) -> KeptSegment:
        partition, uuid = segment.topic_id_partition, segment.segment_id.id
        log = self._folder / (
            f"{partition.topic_id}-{partition.partition}-{segment.start_offset}-{segment.end_offset}"
            f"-{segment.segment_leader_epochs[-1].epoch}-{uuid}{LOG_SUFFIX}"
        )
        part, indexes, stored = log.with_suffix(_SEALING), log.with_suffix(INDEXES_SUFFIX), built
        try:
            if key_ring.current is not None:
                stored = seal_segment(built, uuid, key_ring, part)
            with indexes.open("wb") as file:
                file.write(stored.log_segment_data(segment).indexes)
                file.flush()
                os.fsync(file.fileno())
            kept = KeptSegment(segment, log, stored.log_segment.stat().st_size)
            stored.log_segment.rename(log)
            try:
                sync_folder(self._folder)  # the spool may have the last copy of these records
            except OSError:
                log.rename(stored.log_segment)
                raise
        except OSError:
            part.unlink(missing_ok=True)
            indexes.unlink(missing_ok=True)
            raise
        # Noted in the thread, so that the spool has the segment also if the caller is cancelled.
        self._kept[partition][uuid] = kept
        return kept

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
