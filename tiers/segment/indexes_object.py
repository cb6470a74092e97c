"""The `.indexes` object: everything about a segment but its batches, in one self-describing file, written last.

    magic "TGIX" | version int16 = 1 | number of sections int16
    per section: type int16 | position int32 | length int32 | CRC-32C uint32
    CRC-32C uint32 of all the above
    the sections, in the table's order, without gaps, up to the end of the object

Section types are never reused; a reader skips the ones that it does not know. Every byte is under a checksum, and the
sections are held against each other: what decodes is complete and of one piece. Anything else is `CorruptSegmentError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Protocol
from uuid import UUID

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.kafka_segment_index import KafkaSegmentIndex
from tiers.segment.leader_epoch_checkpoint import decode_leader_epoch_checkpoint, encode_leader_epoch_checkpoint
from tiers.segment.remote_log_index import ChunkCipher, RemoteLogIndex, check_whole_segment
from tiers.segment.segment_index import AbortedTransactionRange, Chunk
from tiers.segment.transaction_index import decode_aborted_ranges, encode_aborted_ranges

MAGIC = b"TGIX"
VERSION = 1
_HEADER = Struct(">4shh")
_TABLE_ENTRY = Struct(">hiiI")
_CRC = Struct(">I")
_INT64 = Struct(">q")


class Section(IntEnum):
    """The order of writing is that of the numbers."""

    METADATA = 1
    OFFSET_INDEX = 2
    TIME_INDEX = 3
    ABORTED_TRANSACTIONS = 4
    TRANSACTION_INDEX = 5
    LEADER_EPOCH_CHECKPOINT = 6
    REMOTE_LOG_INDEX = 7
    ENCRYPTION = 8
    """Only where chunks are encrypted."""
    PRODUCER_SNAPSHOT = 9
    HISTORY_FROM = 10
    """int64."""


class SegmentCiphers(Protocol):
    """A key ring."""

    def cipher(self, uuid: UUID, section: bytes | memoryview) -> ChunkCipher: ...


@dataclass(frozen=True, slots=True)
class SegmentIndexes:
    """The indexes of one segment. `leader_epochs` is cumulative; the `bytes` are files in Kafka's or our own format."""

    offset_index: bytes | memoryview
    time_index: bytes | memoryview
    aborted_transactions: tuple[AbortedTransactionRange, ...]
    transaction_index: bytes | memoryview
    leader_epochs: tuple[LeaderEpochEntry, ...]
    remote_log_index: bytes | memoryview
    producer_snapshot: bytes | memoryview
    """The producers' state at the segment's end."""
    history_from: int
    """Whatever these know of producers and transactions was read from here on, without a gap; 0: they know all."""
    encryption: bytes | memoryview | None = None
    """The segment's wrapped key; None: the stored bytes are the log's."""


@dataclass(frozen=True, slots=True)
class IndexesObject:
    """A decoded object. `metadata` is as it was while the segment was copied: without custom metadata."""

    metadata: RemoteLogSegmentMetadata
    indexes: SegmentIndexes

    def chunks(self) -> tuple[Chunk, ...]:
        """Where they lie: no key is needed."""
        return self._remote_log_index(None).chunks()

    def remote_log_index(self, ciphers: SegmentCiphers | None = None) -> RemoteLogIndex:
        """Raises `EncryptionKeyError` when chunks are encrypted and `ciphers` cannot open them."""
        return self._remote_log_index(open_cipher(self.metadata.segment_id.id, self.indexes.encryption, ciphers))

    def _remote_log_index(self, cipher: ChunkCipher | None) -> RemoteLogIndex:
        indexes = self.indexes
        return RemoteLogIndex.decode(
            indexes.remote_log_index, indexes.aborted_transactions, indexes.leader_epochs, cipher
        )

    def kafka_segment_index(self, chunk_bytes: int = 1 << 20) -> KafkaSegmentIndex:
        """Only for a segment whose stored bytes are the log's."""
        metadata, indexes = self.metadata, self.indexes
        return KafkaSegmentIndex(
            metadata.start_offset,
            metadata.end_offset,
            metadata.segment_size_bytes,
            indexes.offset_index,
            indexes.time_index,
            indexes.aborted_transactions,
            indexes.leader_epochs,
            chunk_bytes,
        )


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
    return encode_sections(sections)


def decode_indexes_object(data: bytes | memoryview, expected: RemoteLogSegmentMetadata | None = None) -> IndexesObject:
    """Sections are views of `data`. Raises `CorruptSegmentError`, also for another segment than `expected`."""
    sections = decode_sections(data)
    missing = [section.name for section in Section if section not in sections and section is not Section.ENCRYPTION]
    if missing:
        raise CorruptSegmentError(f"indexes object without {', '.join(missing)}")
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
            _history_from(sections[Section.HISTORY_FROM]),
            sections.get(Section.ENCRYPTION),
        ),
    )
    metadata = decoded.metadata
    if expected is not None and (metadata.segment_id, metadata.start_offset, metadata.end_offset) != (
        expected.segment_id,
        expected.start_offset,
        expected.end_offset,
    ):
        raise CorruptSegmentError(f"indexes object of {metadata.segment_id}, expected {expected.segment_id}")
    check_whole_segment(decoded.chunks(), metadata)
    return decoded


def open_cipher(
    uuid: UUID, encryption: bytes | memoryview | None, ciphers: SegmentCiphers | None
) -> ChunkCipher | None:
    """None: the segment is not encrypted. Raises `EncryptionKeyError` when it is, and `ciphers` cannot open it."""
    if encryption is None:
        return None
    if ciphers is None:
        raise EncryptionKeyError(f"segment {uuid} is encrypted, and there are no keys")
    return ciphers.cipher(uuid, encryption)


def encode_sections(sections: Mapping[int, bytes]) -> bytes:
    position = _HEADER.size + _TABLE_ENTRY.size * len(sections) + _CRC.size
    table = [_HEADER.pack(MAGIC, VERSION, len(sections))]
    for section, content in sections.items():
        table.append(_TABLE_ENTRY.pack(section, position, len(content), crc32c(content, 0, len(content))))
        position += len(content)
    header = b"".join(table)
    return b"".join((header, _CRC.pack(crc32c(header, 0, len(header))), *sections.values()))


def decode_sections(data: bytes | memoryview) -> dict[int, memoryview]:
    """Every section by its type, known or not, its checksum verified."""
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise CorruptSegmentError(f"indexes object of {len(view)} bytes")
    magic, version, count = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise CorruptSegmentError(f"not an indexes object of version {VERSION}: magic {magic!r}, version {version}")
    table_end = _HEADER.size + _TABLE_ENTRY.size * count
    if count < 0 or table_end + _CRC.size > len(view):
        raise CorruptSegmentError(f"indexes object: table of {count} sections in {len(view)} bytes")
    if crc32c(view, 0, table_end) != _CRC.unpack_from(view, table_end)[0]:
        raise CorruptSegmentError("indexes object: CRC mismatch in the table")
    sections: dict[int, memoryview] = {}
    expected_position = table_end + _CRC.size
    for section, position, length, crc in _TABLE_ENTRY.iter_unpack(view[_HEADER.size : table_end]):
        end = position + length
        if position != expected_position or length < 0 or end > len(view) or section in sections:
            raise CorruptSegmentError(f"indexes object: section {section} at {position} of {length} bytes")
        if crc32c(view, position, end) != crc:
            raise CorruptSegmentError(f"indexes object: CRC mismatch in section {section}")
        sections[section] = view[position:end]
        expected_position = end
    if expected_position != len(view):
        raise CorruptSegmentError(f"indexes object: {len(view) - expected_position} bytes after the last section")
    return sections


def _history_from(section: memoryview) -> int:
    if len(section) != _INT64.size or (offset := int(_INT64.unpack(section)[0])) < 0:
        raise CorruptSegmentError(f"indexes object: {len(section)} bytes are not where its history begins")
    return offset


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
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode_segment_metadata(data: bytes) -> RemoteLogSegmentMetadata:
    try:
        document = json.loads(data)
        topic, txn_index_empty = document["topic"], document["txnIndexEmpty"]
        if type(topic) is not str or type(txn_index_empty) is not bool:
            raise ValueError(f"topic {topic!r}, txnIndexEmpty {txn_index_empty!r}")
        partition = TopicIdPartition(UUID(document["topicId"]), _int32(document["partition"]), topic)
        metadata = RemoteLogSegmentMetadata(
            segment_id=RemoteLogSegmentId(partition, UUID(document["segmentId"])),
            start_offset=_int64(document["startOffset"]),
            end_offset=_int64(document["endOffset"]),
            broker_id=_int32(document["brokerId"]),
            max_timestamp_ms=_int64(document["maxTimestampMs"]),
            event_timestamp_ms=_int64(document["eventTimestampMs"]),
            segment_leader_epochs=tuple(
                LeaderEpochEntry(_int32(epoch), _int64(start)) for epoch, start in document["segmentLeaderEpochs"]
            ),
            segment_size_bytes=_int32(document["segmentSizeInBytes"]),
            state=RemoteLogSegmentState(document["state"]),
            txn_index_empty=txn_index_empty,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSegmentError(f"segment metadata: {error!r}") from error
    if not metadata.segment_leader_epochs or metadata.start_offset > metadata.end_offset:
        raise CorruptSegmentError(f"segment metadata: {metadata.segment_id} holds no offsets or no leader epoch")
    return metadata


def _int32(value: object) -> int:
    return _int_of_bits(value, 32)


def _int64(value: object) -> int:
    return _int_of_bits(value, 64)


def _int_of_bits(value: object, bits: int) -> int:
    """JSON takes any number, and text, for a number."""
    if type(value) is not int or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{value!r} where an int{bits} is expected")
    return value
