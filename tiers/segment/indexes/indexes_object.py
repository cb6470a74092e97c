"""The `.indexes` object: one self-describing file with everything about a segment except its batches; written last.

    magic "TGIX" | version int16 | number of sections int16
    per section: type int16 | position int32 | length int32 | CRC-32C uint32
    CRC-32C uint32 of all bytes above
    the sections, in the table's order, without gaps, up to the end of the object

Section types are never reused. A reader skips the sections that it does not know. A checksum covers every byte, and
the decoder compares the sections with each other. So an object that decodes is complete and consistent; for every other
object the decoder raises `CorruptSegmentError`.

`leader-epoch-checkpoint` is a text file of leader epochs and offsets (docs/semantics.md 10):

    0                 version
    2                 number of entries
    0 0               epoch, start offset
    3 1500

A segment carries every entry up to its end, including those of earlier segments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from struct import Struct
from typing import Protocol
from uuid import UUID

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError, EncryptionKeyError, LaterFormatError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.segment_index import (
    AbortedTransactionRange,
    Chunk,
    OpenChunk,
    SegmentIndex,
    check_whole_segment,
    decode_aborted_ranges,
    decode_remote_log_index,
    encode_aborted_ranges,
)

MAGIC = b"TGIX"
VERSION = 3
_HEADER = Struct(">4shh")
_TABLE_ENTRY = Struct(">hiiI")
_CRC = Struct(">I")
_INT64 = Struct(">q")
_CHECKPOINT_VERSION = 0


class Section(IntEnum):
    """The section types. The encoder writes the sections in the order of these numbers."""

    METADATA = 1
    OFFSET_INDEX = 2
    TIME_INDEX = 3
    ABORTED_TRANSACTIONS = 4
    TRANSACTION_INDEX = 5
    LEADER_EPOCH_CHECKPOINT = 6
    REMOTE_LOG_INDEX = 7
    ENCRYPTION = 8
    """Present only when the chunks are encrypted."""
    PRODUCER_SNAPSHOT = 9
    HISTORY_FROM = 10
    """An int64."""
    FACTS = 11
    """The facts of the partition as of the announcement of the copy (`PartitionFacts`), or nothing."""


class SegmentCiphers(Protocol):
    """A key ring that opens the chunks of encrypted segments."""

    def open_chunks(self, uuid: UUID, section: bytes | memoryview) -> OpenChunk:
        """Returns what opens the chunks of the segment `uuid` with this ENCRYPTION section.

        Raises `EncryptionKeyError`."""


@dataclass(frozen=True, slots=True)
class SegmentIndexes:
    """The indexes of one segment. The `bytes` are files in Kafka's or Tidegate's own format.

    `leader_epochs` is cumulative: it includes the leader epochs of earlier segments."""

    offset_index: bytes | memoryview
    time_index: bytes | memoryview
    aborted_transactions: tuple[AbortedTransactionRange, ...]
    transaction_index: bytes | memoryview
    leader_epochs: tuple[LeaderEpochEntry, ...]
    remote_log_index: bytes | memoryview
    producer_snapshot: bytes | memoryview
    """The state of the producers at the segment's end."""
    history_from: int
    """The offset from which the copier has seen every batch of the log.

    Above 0, the indexes may lack producers and transactions that began below this offset."""
    encryption: bytes | memoryview | None = None
    """The ENCRYPTION section with the segment's wrapped key; None when the stored bytes are the log's bytes."""
    facts: bytes | memoryview = b""
    """The FACTS section; empty if the writer knew no metadata."""


@dataclass(frozen=True, slots=True)
class IndexesObject:
    """A decoded `.indexes` object. `metadata` dates from the copy of the segment, so it has no custom metadata."""

    metadata: RemoteLogSegmentMetadata
    indexes: SegmentIndexes

    def epochs_before(self) -> tuple[LeaderEpochEntry, ...]:
        """Returns the leader epochs that began before the segment, for a builder of its log."""
        return tuple(entry for entry in self.indexes.leader_epochs if entry.start_offset < self.metadata.start_offset)

    def chunks(self) -> tuple[Chunk, ...]:
        """Returns the chunks of the segment. This needs no encryption key."""
        return decode_remote_log_index(self.indexes.remote_log_index)

    def remote_log_index(self, ciphers: SegmentCiphers | None = None) -> SegmentIndex:
        """Returns the remote log index. Raises `EncryptionKeyError` when `ciphers` cannot open encrypted chunks."""
        indexes = self.indexes
        opened = open_cipher(self.metadata.segment_id.id, indexes.encryption, ciphers)
        return SegmentIndex(self.chunks(), indexes.aborted_transactions, indexes.leader_epochs, opened)


def encode_indexes_object(metadata: RemoteLogSegmentMetadata, indexes: SegmentIndexes) -> bytes:
    sections: dict[int, bytes] = {
        Section.METADATA: encode_segment_metadata(metadata),
        Section.OFFSET_INDEX: bytes(indexes.offset_index),
        Section.TIME_INDEX: bytes(indexes.time_index),
        Section.ABORTED_TRANSACTIONS: encode_aborted_ranges(indexes.aborted_transactions),
        Section.TRANSACTION_INDEX: bytes(indexes.transaction_index),
        Section.LEADER_EPOCH_CHECKPOINT: encode_leader_epoch_checkpoint(indexes.leader_epochs),
        Section.REMOTE_LOG_INDEX: bytes(indexes.remote_log_index),
    }
    if indexes.encryption is not None:
        sections[Section.ENCRYPTION] = bytes(indexes.encryption)
    sections[Section.PRODUCER_SNAPSHOT] = bytes(indexes.producer_snapshot)
    sections[Section.HISTORY_FROM] = _INT64.pack(indexes.history_from)
    sections[Section.FACTS] = bytes(indexes.facts)
    return encode_sections(sections)


def decode_indexes_object(data: bytes | memoryview, expected: RemoteLogSegmentMetadata | None = None) -> IndexesObject:
    """Decodes an object; its sections are views of `data`.

    Raises `CorruptSegmentError` when the object is damaged or incomplete, or when it belongs to another segment than
    `expected`.
    """
    sections = decode_sections(data)
    missing = [section.name for section in Section if section not in sections and section is not Section.ENCRYPTION]
    if missing:
        raise CorruptSegmentError(f"the indexes object is without {', '.join(missing)}")
    history = sections[Section.HISTORY_FROM]
    if len(history) != _INT64.size or (history_from := int(_INT64.unpack(history)[0])) < 0:
        raise CorruptSegmentError(f"indexes object: the history section of {len(history)} bytes is invalid")
    decoded = IndexesObject(
        decode_segment_metadata(bytes(sections[Section.METADATA])),
        SegmentIndexes(
            sections[Section.OFFSET_INDEX],
            sections[Section.TIME_INDEX],
            decode_aborted_ranges(sections[Section.ABORTED_TRANSACTIONS]),
            sections[Section.TRANSACTION_INDEX],
            decode_leader_epoch_checkpoint(sections[Section.LEADER_EPOCH_CHECKPOINT]),
            sections[Section.REMOTE_LOG_INDEX],
            sections[Section.PRODUCER_SNAPSHOT],
            history_from,
            sections.get(Section.ENCRYPTION),
            sections[Section.FACTS],
        ),
    )
    found, wanted = decoded.metadata, expected or decoded.metadata
    named = found.segment_id, found.start_offset, found.end_offset
    if named != (wanted.segment_id, wanted.start_offset, wanted.end_offset):
        raise CorruptSegmentError(f"the indexes object belongs to {named[0]}, but {wanted.segment_id} was expected")
    check_whole_segment(decoded.chunks(), found)
    return decoded


def open_cipher(uuid: UUID, encryption: bytes | memoryview | None, ciphers: SegmentCiphers | None) -> OpenChunk | None:
    """Returns what opens the segment's chunks; None when the segment is not encrypted.

    Raises `EncryptionKeyError` when the segment is encrypted and `ciphers` cannot open it.
    """
    if encryption is None:
        return None
    if ciphers is None:
        raise EncryptionKeyError(f"segment {uuid} is encrypted, but there are no keys: configure [encryption.keys]")
    return ciphers.open_chunks(uuid, encryption)


def encode_sections(sections: Mapping[int, bytes]) -> bytes:
    position = _HEADER.size + _TABLE_ENTRY.size * len(sections) + _CRC.size
    table = [_HEADER.pack(MAGIC, VERSION, len(sections))]
    for section, content in sections.items():
        table.append(_TABLE_ENTRY.pack(section, position, len(content), crc32c(content, 0, len(content))))
        position += len(content)
    header = b"".join(table)
    return b"".join((header, _CRC.pack(crc32c(header, 0, len(header))), *sections.values()))


def decode_sections(data: bytes | memoryview) -> dict[int, memoryview]:
    """Returns every section by its type, including unknown types, after verifying its checksum.

    Raises `CorruptSegmentError`.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise CorruptSegmentError(f"an indexes object of {len(view)} bytes is shorter than its header")
    magic, version, count = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CorruptSegmentError(f"not an indexes object: magic {magic!r}")
    if version != VERSION:
        raise LaterFormatError(
            f"an indexes object of version {version}, and this release reads version {VERSION} alone"
        )
    table_end = _HEADER.size + _TABLE_ENTRY.size * count
    if count < 0 or table_end + _CRC.size > len(view):
        raise CorruptSegmentError(f"indexes object: a table of {count} sections does not fit {len(view)} bytes")
    if crc32c(view, 0, table_end) != _CRC.unpack_from(view, table_end)[0]:
        raise CorruptSegmentError("indexes object: CRC mismatch in the section table")
    sections: dict[int, memoryview] = {}
    expected_position = table_end + _CRC.size
    for section, position, length, crc in _TABLE_ENTRY.iter_unpack(view[_HEADER.size : table_end]):
        end = position + length
        if position != expected_position or length < 0 or end > len(view) or section in sections:
            raise CorruptSegmentError(
                f"indexes object: section {section} at {position} with {length} bytes is misplaced or a duplicate"
            )
        if crc32c(view, position, end) != crc:
            raise CorruptSegmentError(f"indexes object: CRC mismatch in section {section}")
        sections[section] = view[position:end]
        expected_position = end
    if expected_position != len(view):
        raise CorruptSegmentError(f"indexes object: {len(view) - expected_position} bytes follow the last section")
    return sections


def encode_leader_epoch_checkpoint(entries: tuple[LeaderEpochEntry, ...]) -> bytes:
    lines = [str(_CHECKPOINT_VERSION), str(len(entries)), *(f"{entry.epoch} {entry.start_offset}" for entry in entries)]
    return ("\n".join(lines) + "\n").encode()


def decode_leader_epoch_checkpoint(data: bytes | memoryview) -> tuple[LeaderEpochEntry, ...]:
    """Decodes the file. Raises `CorruptSegmentError` unless the entries ascend and have the announced number."""
    try:
        version, count, *lines = str(data, "ascii").splitlines()
        if int(version) != _CHECKPOINT_VERSION:
            raise CorruptSegmentError(f"leader-epoch checkpoint: version {version} is not supported")
        pairs = [(int(epoch), int(offset)) for epoch, offset in (line.split(" ") for line in lines)]
        announced = int(count)
    except ValueError as error:
        raise CorruptSegmentError(f"leader-epoch checkpoint: {error}") from error
    if len(pairs) != announced:
        raise CorruptSegmentError(f"leader-epoch checkpoint: {len(pairs)} entries, but {announced} are announced")
    entries = tuple(LeaderEpochEntry(epoch, offset) for epoch, offset in pairs)
    for previous, entry in pairwise(entries):
        if entry.epoch <= previous.epoch or entry.start_offset < previous.start_offset:
            raise CorruptSegmentError(f"leader-epoch checkpoint: {entry} follows {previous}")
    return entries


def encode_segment_metadata(metadata: RemoteLogSegmentMetadata) -> bytes:
    partition = metadata.topic_id_partition
    document = {
        "topic": partition.topic,
        "topicId": str(partition.topic_id),
        "partition": partition.partition,
        "segmentId": str(metadata.segment_id.id),
        "startOffset": metadata.start_offset,
        "endOffset": metadata.end_offset,
        "brokerId": metadata.broker_id,
        "maxTimestampMs": metadata.max_timestamp_ms,
        "eventTimestampMs": metadata.event_timestamp_ms,
        "segmentLeaderEpochs": [[entry.epoch, entry.start_offset] for entry in metadata.segment_leader_epochs],
        "segmentSizeInBytes": metadata.segment_size_bytes,
        "state": metadata.state.value,
        "txnIndexEmpty": metadata.txn_index_empty,
        "copyEpoch": metadata.copy_epoch,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode_segment_metadata(data: bytes) -> RemoteLogSegmentMetadata:
    try:
        document = json.loads(data)
        topic, txn_index_empty = document["topic"], document["txnIndexEmpty"]
        if type(topic) is not str or type(txn_index_empty) is not bool:
            raise ValueError(f"topic {topic!r}, txnIndexEmpty {txn_index_empty!r}")
        partition = TopicIdPartition(UUID(document["topicId"]), _integer(document["partition"], 32), topic)
        metadata = RemoteLogSegmentMetadata(
            segment_id=RemoteLogSegmentId(partition, UUID(document["segmentId"])),
            start_offset=_integer(document["startOffset"], 64),
            end_offset=_integer(document["endOffset"], 64),
            broker_id=_integer(document["brokerId"], 32),
            max_timestamp_ms=_integer(document["maxTimestampMs"], 64),
            event_timestamp_ms=_integer(document["eventTimestampMs"], 64),
            segment_leader_epochs=tuple(
                LeaderEpochEntry(_integer(epoch, 32), _integer(start, 64))
                for epoch, start in document["segmentLeaderEpochs"]
            ),
            segment_size_bytes=_integer(document["segmentSizeInBytes"], 32),
            state=RemoteLogSegmentState(document["state"]),
            txn_index_empty=txn_index_empty,
            copy_epoch=_integer(document["copyEpoch"], 32),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSegmentError(f"segment metadata: {error!r}") from error
    if not metadata.segment_leader_epochs or metadata.start_offset > metadata.end_offset:
        raise CorruptSegmentError(f"segment metadata: {metadata.segment_id} has no offsets or no leader epoch")
    return metadata


def _integer(value: object, bits: int) -> int:
    """Returns `value` if it is an integer of that size. A JSON decoder returns values of any type and size.

    Raises `ValueError`.
    """
    if type(value) is not int or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"found {value!r} instead of an int{bits}")
    return value
