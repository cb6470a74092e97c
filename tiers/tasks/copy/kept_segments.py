"""`KeptSegment`: a built segment in the spool, as the two files that the store gets (docs/design.md, "Attempts").

The files stay until the copy counts, whatever fails meanwhile, and a restart finds them again. Their names have the
partition, the offsets, the last leader epoch and the uuid of the attempt. The `.indexes` file has a checksum of every
chunk of the `.log` file. If segments are encrypted, both files are as the store gets them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import KeyRing, seal_segment, unsealed_segment
from tiers.storage.object_key import INDEXES_SUFFIX, LOG_SUFFIX
from tiers.storage.remote_storage_manager import LogSegmentData

_PART_SUFFIX = ".part"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """`metadata` is that of the attempt, in COPY_SEGMENT_STARTED. `size_bytes` is the size of the `.log` file."""

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
        """Returns what a storage manager copies. Blocks on the disk, and raises `OSError`."""
        return LogSegmentData(self.log, self.indexes.read_bytes())

    def opened(self, ciphers: SegmentCiphers, path: Path) -> BuiltSegment:
        """Returns the segment without encryption, with its log in the new file `path`, for an attempt of another uuid.

        Blocks on the disk. Raises `CorruptSegmentError` when the files are damaged, `EncryptionKeyError`, `OSError`."""
        decoded = decode_indexes_object(self.indexes.read_bytes(), self.metadata)
        return unsealed_segment(decoded, self.log, ciphers, path)

    def is_intact(self, ciphers: SegmentCiphers) -> bool:
        """Returns whether the files have the bytes that were written. Blocks on the disk. Raises `OSError`."""
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


def keep_segment(
    folder: Path, segment: RemoteLogSegmentMetadata, built: BuiltSegment, key_ring: KeyRing
) -> KeptSegment:
    """Makes the two files of an attempt. The file of `built` is one of them from then on, unless it is encrypted.

    Blocks on the disk, which then holds an encrypted segment twice. After an `OSError`, `built` is as before."""
    name = (
        f"{segment.topic_id_partition.topic_id}-{segment.topic_id_partition.partition}-{segment.start_offset}"
        f"-{segment.end_offset}-{segment.segment_leader_epochs[-1].epoch}-{segment.segment_id.id}"
    )
    log, part = folder / f"{name}{LOG_SUFFIX}", folder / f"{name}{_PART_SUFFIX}"
    indexes = log.with_suffix(INDEXES_SUFFIX)
    try:
        stored = built
        if key_ring.current is not None:
            stored = seal_segment(built, segment.segment_id.id, key_ring, part)
        _write_durably(indexes, stored.log_segment_data(segment).indexes)
        kept = KeptSegment(segment, log, stored.log_segment.stat().st_size)
        stored.log_segment.rename(log)
    except OSError:
        part.unlink(missing_ok=True)
        indexes.unlink(missing_ok=True)
        raise
    return kept


def kept_segments(folder: Path) -> Iterator[KeptSegment]:
    """Yields the segments that an earlier process kept, and removes the files that it did not complete.

    Files that this release cannot read stay. Blocks on the disk."""
    for part in folder.glob(f"*{_PART_SUFFIX}"):
        part.unlink()
    for log in folder.glob(f"*{LOG_SUFFIX}"):
        indexes = log.with_suffix(INDEXES_SUFFIX)
        if not indexes.exists():  # it is removed first
            log.unlink()
            continue
        try:
            metadata = decode_indexes_object(indexes.read_bytes()).metadata
        except CorruptSegmentError as error:
            logger.error(
                "a segment in the spool cannot be read: it stays there", extra={"path": str(log), "error": str(error)}
            )
            continue
        yield KeptSegment(metadata, log, log.stat().st_size)
    for indexes in folder.glob(f"*{INDEXES_SUFFIX}"):
        if not indexes.with_suffix(LOG_SUFFIX).exists():
            indexes.unlink()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
