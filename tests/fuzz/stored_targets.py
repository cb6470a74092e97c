"""What must hold for any bytes that lie in a log, in the metadata topic or in the store."""

from __future__ import annotations

from itertools import islice
from struct import Struct

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import (
    RecordBatch,
    crc32c,
    crc_matches,
    cut_at_batches,
    iterate_batches,
    skip_to_offset,
    verify_batches,
)
from protocol.records.record_reader import first_record_at_or_after, read_records
from tests.fuzz.wire_targets import MAX_PREFIXES
from tiers.errors import CorruptSegmentError, RemoteLogMetadataError
from tiers.metadata.records.serde import decode_key, decode_value, encode_key, encode_value, key_of
from tiers.segment.indexes.indexes_object import decode_indexes_object, encode_indexes_object
from tiers.segment.producer_state import ProducerState, decode_producer_snapshot, encode_producer_snapshot

_MAX_RECORDS = 2_000


def _batches(data: bytes, end: int) -> tuple[list[RecordBatch], bool]:
    """And whether a corrupt one follows them."""
    found: list[RecordBatch] = []
    try:
        found.extend(iterate_batches(data, 0, end))
    except CorruptBatchError:
        return _good_batches(data, end), True
    return found, False


def _good_batches(data: bytes, end: int) -> list[RecordBatch]:
    found: list[RecordBatch] = []
    try:
        for batch in iterate_batches(data, 0, end):
            found.append(batch)  # noqa: PERF402 - those before the corrupt one are wanted
    except CorruptBatchError:
        pass
    return found


def record_batches(data: bytes) -> bool:
    """Every way over the batches finds the same ones, from a part of the bytes no others; nothing bad is repaired."""
    found, is_corrupt = _batches(data, len(data))
    end = 0
    for batch in found:
        assert batch.start == end < batch.end <= len(data)
        assert batch.base_offset <= batch.last_offset
        end = batch.end
        try:
            assert skip_to_offset(data, batch.last_offset) <= batch.start
        except CorruptBatchError:
            raise AssertionError("a good batch is not found") from None
        _read(data, batch)
    for size in range(0, len(data), max(1, len(data) // MAX_PREFIXES)):
        part, part_is_corrupt = _batches(data, size)
        assert part == [batch for batch in found if batch.end <= size]
        assert is_corrupt or not part_is_corrupt
    if is_corrupt:
        return False
    assert cut_at_batches(data, len(data), min_one=False) == end
    assert cut_at_batches(data, 0, min_one=True) == (found[0].end if found else 0)
    assert cut_at_batches(data, end - 1, min_one=False) == (found[-1].start if found else 0)
    try:
        assert verify_batches(data) == found
    except CorruptBatchError:
        return False
    assert all(crc_matches(data, batch) for batch in found)
    return bool(found)


def _read(data: bytes, batch: RecordBatch) -> None:
    try:
        records = list(islice(read_records(data, batch), _MAX_RECORDS))
        located = first_record_at_or_after(data, batch, batch.max_timestamp, batch.base_offset)
    except CorruptBatchError:
        return
    if batch.magic == 2 and len(records) < _MAX_RECORDS:
        assert len(records) == batch.records_count
    if located is not None and len(records) < _MAX_RECORDS:
        assert located in [(record.timestamp, record.offset) for record in records]


def metadata_record(data: bytes) -> bool:
    """A readable record can be written, and says the same. Half a record is an error."""
    try:
        key = decode_key(data)
    except RemoteLogMetadataError:
        pass
    else:
        assert decode_key(encode_key(key)) == key
    try:
        record = decode_value(data)
    except RemoteLogMetadataError:
        return False
    if record is None:
        return False
    written = encode_value(record)
    again = decode_value(written)
    assert again == record
    assert encode_value(again) == written
    assert decode_key(encode_key(key_of(record))) == key_of(record)
    for size in range(len(data)):
        try:
            part = decode_value(data[:size])
        except RemoteLogMetadataError:
            continue
        raise AssertionError(f"{size} of {len(data)} bytes are read as {part}")
    return True


def producer_snapshot(data: bytes) -> bool:
    """A snapshot that decodes can be written again, and says the same. Half a snapshot is an error."""
    if not data:
        return False
    content = data[1:]
    if data[0] & 1 and len(content) >= 6:  # with a checksum that holds
        content = content[:2] + crc32c(content, 6, len(content)).to_bytes(4, "big") + content[6:]
    try:
        entries = decode_producer_snapshot(content)
    except CorruptSegmentError:
        return False
    assert encode_producer_snapshot(entries) == content
    for size in range(0, len(content), max(1, len(content) // MAX_PREFIXES)):
        try:
            decode_producer_snapshot(content[:size])
        except CorruptSegmentError:
            continue
        raise AssertionError(f"{size} of {len(content)} bytes are read")
    ongoing = {one.producer_id: one.current_txn_first_offset for one in entries}
    again = ProducerState(entries).entries(-(1 << 64), ongoing)
    assert sorted(again) == sorted(entries)
    return bool(entries)


_HEADER = Struct(">4shh")
_ENTRY = Struct(">hiiI")


def _sealed(data: bytes) -> bytes:
    """With checksums that hold, so that what lies behind them is reached."""
    out = bytearray(data)
    if len(out) < _HEADER.size:
        return data
    count = _HEADER.unpack_from(out)[2]
    end = _HEADER.size + _ENTRY.size * count
    if not 0 <= count <= 16 or end + 4 > len(out):
        return data
    for at in range(_HEADER.size, end, _ENTRY.size):
        _, position, length, _ = _ENTRY.unpack_from(out, at)
        if 0 <= position <= position + length <= len(out):
            out[at + 10 : at + 14] = crc32c(out, position, position + length).to_bytes(4, "big")
    out[end : end + 4] = crc32c(out, 0, end).to_bytes(4, "big")
    return bytes(out)


def indexes_object(data: bytes) -> bool:
    """Decoded indexes are consistent: numbers are numbers, chunks cover the segment, and they encode again."""
    if not data:
        return False
    content = _sealed(data[1:]) if data[0] & 1 else data[1:]
    try:
        decoded = decode_indexes_object(content)
    except CorruptSegmentError:
        return False
    metadata = decoded.metadata
    index = decoded.remote_log_index()
    chunks = index.chunks()
    position = 0
    for number, chunk in enumerate(chunks):
        assert chunk.stored_position == position
        position += chunk.stored_bytes
        assert index.chunk_number_for_offset(chunk.last_offset) == number
        assert index.chunk_number_for_timestamp(chunk.max_timestamp_ms) is not None
    assert sum(chunk.log_bytes for chunk in chunks) == metadata.segment_size_bytes
    assert chunks[-1].last_offset == metadata.end_offset
    assert metadata.start_offset <= metadata.end_offset
    index.aborted_transactions(metadata.start_offset, metadata.end_offset)
    for value in (metadata.broker_id, metadata.max_timestamp_ms, metadata.topic_id_partition.partition):
        assert type(value) is int
    assert all(type(one.epoch) is int and type(one.start_offset) is int for one in metadata.segment_leader_epochs)
    assert isinstance(metadata.topic_id_partition.topic, str)
    assert type(metadata.txn_index_empty) is bool
    encode_value(metadata)
    written = encode_indexes_object(metadata, decoded.indexes)
    again = decode_indexes_object(written, metadata)
    assert (again.metadata, again.indexes) == (metadata, decoded.indexes)
    return True
