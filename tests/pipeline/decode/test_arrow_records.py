"""The columns have every visible row, and no other.

The expected rows are kafka-python's and those that were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import ALL_COLUMNS, KAFKA_COLUMNS, MAX_ARROW_BYTES, RecordColumns
from pipeline.decode.wanted_batches import CorruptRecordsError
from protocol.primitives import Buffer
from protocol.records.record_batch import (
    CODEC_GZIP,
    CODEC_LZ4,
    CODEC_NONE,
    CODEC_SNAPPY,
    CODEC_ZSTD,
    iterate_batches,
)
from protocol.records.record_reader import Record
from tests.support.fakes.record_batches import (
    batch_of,
    build_batch,
    control_batch,
    legacy_message,
    legacy_wrapper,
    record,
)
from tiers.segment.indexes.segment_index import AbortedTransactionRange

LAST = (1 << 63) - 1


def arrow_batches(
    log: Buffer,
    columns: RecordColumns = ALL_COLUMNS,
    first: int = 0,
    end: int = LAST,
    aborted: Sequence[AbortedTransactionRange] | None = None,
    since: int | None = None,
) -> list[pa.RecordBatch]:
    """Returns the result of both decoders."""
    compiled, plain = (
        list(one_decoder(log, columns, first, end, aborted, since, is_compiled)) for is_compiled in (True, False)
    )
    assert pa.Table.from_batches(compiled, columns.schema).equals(pa.Table.from_batches(plain, columns.schema))
    return compiled


def one_decoder(
    log: Buffer,
    columns: RecordColumns,
    first: int,
    end: int,
    aborted: Sequence[AbortedTransactionRange] | None,
    since: int | None,
    is_compiled: bool,
) -> Iterator[pa.RecordBatch]:
    for batch in decode_batches(
        log,
        topic="orders",
        partition=3,
        first_offset=first,
        end_offset=end,
        columns=columns,
        aborted=aborted or (),
        is_committed_only=aborted is not None,
        min_timestamp_ms=since,
        is_compiled=is_compiled,
    ):
        batch.validate(full=True)
        assert batch.schema == columns.schema
        assert batch.nbytes <= MAX_ARROW_BYTES or batch.num_rows == 1
        yield batch


def rows(log: Buffer, **options: object) -> list[dict[str, object]]:
    return [row for batch in arrow_batches(log, **options) for row in batch.to_pylist()]  # type: ignore[arg-type]


def offsets(log: Buffer, **options: object) -> list[int]:
    found = arrow_batches(log, RecordColumns(("offset",)), **options)  # type: ignore[arg-type]
    return [offset for batch in found for offset in batch.column(0).to_pylist()]


def records(log: Buffer, **options: object) -> list[Record]:
    found = []
    for batch in arrow_batches(log, **options):  # type: ignore[arg-type]
        timestamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for row, timestamp in zip(batch.to_pylist(), timestamps, strict=True):
            headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
            found.append(record(row["offset"], timestamp // 1000, row["key"], row["value"], headers))
    return found


payloads = st.none() | st.binary(max_size=200)
header_lists = st.lists(st.tuples(st.text(max_size=8), payloads), max_size=3)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    """Timestamps go back as often as forth; offsets have the gaps that compaction leaves."""
    offset = draw(st.integers(0, 2**40))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        made.append(record(offset, draw(st.integers(0, 2**45)), draw(payloads), draw(payloads), draw(header_lists)))
        offset += draw(st.integers(1, 300))
    return made


@given(record_lists(), st.integers(0, 4), st.booleans())
def test_records_of_every_codec(written: list[Record], codec: int, xerial: bool) -> None:
    log = build_batch(written[0].offset - written[0].offset % 7, written, codec=codec, xerial=xerial)
    assert records(log) == written
    if codec != CODEC_SNAPPY or xerial:  # kafka-python reads xerial's framing alone
        theirs = [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for b in MemoryRecords(log) for r in b]
        assert theirs == written


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000), st.integers(0, 4)), min_size=2, max_size=6))
def test_batches_of_all_sizes_one_after_another(batches: list[tuple[int, int, int]]) -> None:
    log = b""
    written: list[Record] = []
    for count, value_bytes, codec in batches:
        first = len(written)
        made = [record(offset, value=b"%d" % offset * value_bytes) for offset in range(first, first + count)]
        log += build_batch(first, made, codec=codec, xerial=True)
        written += made
    assert records(log) == written


def test_batches_that_were_checked_before_are_not_looked_for_again() -> None:
    damaged = bytearray(batch_of(0, 10) + batch_of(10, 10) + batch_of(20, 10))
    batches = list(iterate_batches(damaged))
    damaged[5] ^= 1  # in what the first one begins with
    checked = decode_batches(
        damaged,
        topic="orders",
        partition=3,
        first_offset=0,
        end_offset=LAST,
        columns=RecordColumns(("offset",)),
        is_committed_only=False,
        checked=batches[1:],
    )
    assert [offset for batch in checked for offset in batch.column(0).to_pylist()] == list(range(10, 30))


def test_a_row_has_what_sparks_own_source_gives() -> None:
    log = build_batch(5, [record(5, 1_700_000_000_123, b"k", b"v", [("h", None)]), record(6, 1_700_000_000_124)])
    (first, second) = rows(log, columns=KAFKA_COLUMNS)
    assert list(first) == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert first.pop("timestamp").isoformat() == "2023-11-14T22:13:20.123000+00:00"  # type: ignore[attr-defined]
    assert list(first.values()) == [b"k", b"v", "orders", 3, 5, 0]
    assert second["key"] is None
    assert [row["headers"] for row in rows(log)] == [[{"key": "h", "value": None}], None]


def test_the_range_is_inclusive_at_both_ends_and_within_batches() -> None:
    log = b"".join(batch_of(offset, 10) for offset in (0, 10, 20))
    assert offsets(log, first=7, end=22) == list(range(7, 23))
    assert offsets(log, first=15, end=15) == [15]
    assert offsets(log, first=30) == []
    assert offsets(log[:-1] + b"?", end=19) == list(range(20)), "beyond the range, nothing is judged"
    assert offsets(build_batch(0, [], last_offset=9) + batch_of(10, 1)) == [10], "compaction leaves empty batches"


def test_log_append_time_is_every_records_time() -> None:
    log = build_batch(0, [record(0, 10), record(1, 20)], log_append_time_ms=9000)
    assert [r.timestamp for r in records(log)] == [9000, 9000]
    assert [row["timestampType"] for row in rows(log)] == [1, 1]


def transactional(offset: int, producer_id: int) -> bytes:
    made = [record(offset), record(offset + 1)]
    return build_batch(offset, made, producer_id=producer_id, producer_epoch=0, transactional=True)


TWO_TRANSACTIONS = (
    transactional(0, 7)
    + transactional(2, 8)
    + batch_of(4, 1)
    + transactional(5, 7)
    + control_batch(7, commit=False, producer_id=7)
    + transactional(8, 7)
    + control_batch(10, commit=True, producer_id=8)
    + control_batch(11, commit=True, producer_id=7)
)


@pytest.mark.parametrize("last_offset", [7, LAST])
def test_an_aborted_transaction_ends_with_its_producers_marker(last_offset: int) -> None:
    aborted = [AbortedTransactionRange(7, 0, last_offset)]
    assert offsets(TWO_TRANSACTIONS, aborted=aborted) == [2, 3, 4, 8, 9]
    assert offsets(TWO_TRANSACTIONS, aborted=aborted, first=1, end=8) == [2, 3, 4, 8]
    assert offsets(TWO_TRANSACTIONS) == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def test_a_producer_may_abort_twice_and_before_the_range() -> None:
    after = TWO_TRANSACTIONS[TWO_TRANSACTIONS.index(transactional(8, 7)) :]
    assert offsets(after, aborted=[AbortedTransactionRange(7, 0, 7)]) == [8, 9]
    log = (
        TWO_TRANSACTIONS + transactional(12, 7) + control_batch(14, commit=False, producer_id=7) + transactional(15, 7)
    )
    aborted = [AbortedTransactionRange(7, 0, LAST), AbortedTransactionRange(7, 12, LAST)]
    assert offsets(log, aborted=aborted) == [2, 3, 4, 8, 9, 15, 16]


def test_batches_that_are_too_old_are_left_out_without_being_read() -> None:
    unreadable = build_batch(0, [record(0, 999)])[:-3] + b"\xff\xff\xff"
    log = with_crc(unreadable) + build_batch(1, [record(1, 998), record(2, 1000)])
    assert offsets(log, since=1000) == [1, 2]
    with pytest.raises(CorruptRecordsError):
        offsets(log)


def with_crc(batch: bytes) -> bytes:
    return batch[:17] + int(google_crc32c.value(batch[21:])).to_bytes(4, "big") + batch[21:]


def test_small_legacy_messages_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4_000
    monkeypatch.setattr("pipeline.decode.arrow_records.MAX_ARROW_BYTES", limit)
    made = [record(offset, key=None, value=None) for offset in range(200)]
    log = b"".join(legacy_wrapper(1, first, made[first : first + 50], CODEC_GZIP) for first in range(0, 200, 50))
    found = list(one_decoder(log, KAFKA_COLUMNS, 0, LAST, None, None, is_compiled=True))
    assert [offset for batch in found for offset in batch.column("offset").to_pylist()] == list(range(200))
    assert all(batch.nbytes <= limit for batch in found)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [CODEC_NONE, CODEC_GZIP, CODEC_SNAPPY, CODEC_LZ4])
def test_legacy_messages(magic: int, codec: int) -> None:
    made = [record(offset, 1_500_000_000_000 + offset, b"k", b"v%d" % offset) for offset in range(10, 14)]
    if codec == CODEC_NONE:
        legacy = b"".join(legacy_message(magic, r.offset, r.timestamp, r.key, r.value) for r in made)
    else:
        legacy = legacy_wrapper(magic, 10, made, codec)
    log = batch_of(0, 2) + legacy + batch_of(14, 1)
    assert offsets(log) == [0, 1, 10, 11, 12, 13, 14]
    assert offsets(log, first=11, end=12) == [11, 12]
    found = rows(log, first=10, end=13)
    assert [row["timestampType"] for row in found] == [0 if magic else -1] * 4
    expected = [r if magic else r._replace(timestamp=-1) for r in made]
    assert records(log, first=10, end=13) == expected
    if magic == 0 and codec == CODEC_LZ4:
        return  # kafka-python wants another package for it
    theirs = [(r.offset, r.timestamp if magic else -1, r.key, r.value) for b in MemoryRecords(legacy) for r in b]
    assert theirs == [one[:4] for one in expected]


def test_the_records_before_a_corrupt_batch_are_given_too() -> None:
    good = batch_of(0, 5, value_bytes=1 << 20)
    bad = batch_of(5, 5, value_bytes=1 << 20)[:-1] + b"\x02"  # one header, that is not there
    found = one_decoder(good + with_crc(bad), ALL_COLUMNS, 0, LAST, None, None, True)
    assert next(found).column("offset").to_pylist() == [0, 1, 2, 3, 4]
    with pytest.raises(CorruptRecordsError, match="offset 5"):
        next(found)


def test_large_batches_and_records_leave_in_pieces() -> None:
    """One record is larger than an Arrow batch."""
    made = [record(0), record(1, value=bytes(10 << 20)), *(record(at, value=bytes(1 << 20)) for at in range(2, 10))]
    log = build_batch(0, made, codec=CODEC_ZSTD)
    assert len(arrow_batches(log)) > 2
    assert records(log) == made


@pytest.mark.parametrize(
    ("damage", "good", "offset", "reason"),
    [
        (lambda log: log[:-1], 20, 20, "no whole batch"),
        (lambda log: log[:-100] + b"\x07" + log[-99:], 20, 20, "CRC"),
        (lambda log: log + bytes(30), 30, 30, "length 0"),
        (lambda log: log + batch_of(28, 5), 30, 28, "follows offset 29"),
    ],
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_records_before_a_corrupt_batch_are_returned(
    damage: Callable[[bytes], bytes], good: int, offset: int, reason: str, is_compiled: bool
) -> None:
    log = damage(b"".join(batch_of(first, 10, value_bytes=40) for first in (0, 10, 20)))
    found = decode_batches(
        log, topic="t", partition=0, first_offset=0, end_offset=LAST, is_committed_only=True, is_compiled=is_compiled
    )
    before = next(found)
    assert before.num_rows == good
    with pytest.raises(CorruptRecordsError, match=f"offset {offset}: .*{reason}") as raised:
        next(found)
    assert raised.value.offset == offset


def test_the_data_source_meets_the_demands_of_spark_to_the_letter() -> None:
    strings, binaries = StringType(), BinaryType()
    header = StructType([StructField("key", strings), StructField("value", binaries)])
    declared = StructType(
        [
            StructField("key", binaries),
            StructField("value", binaries),
            StructField("topic", strings),
            StructField("partition", IntegerType()),
            StructField("offset", LongType()),
            StructField("timestamp", TimestampType()),
            StructField("timestampType", IntegerType()),
            StructField("headers", ArrayType(header)),
        ]
    )
    assert to_arrow_schema(declared, timezone="UTC").equals(ALL_COLUMNS.schema)


def test_columns_come_in_the_order_asked_for() -> None:
    (batch,) = arrow_batches(batch_of(0, 2), RecordColumns(("value", "offset", "topic")))
    assert batch.schema.names == ["value", "offset", "topic"]
    for wrong in ((), ("value", "value"), ("leader",)):
        with pytest.raises(ValueError, match="the columns are key, value"):
            RecordColumns(wrong)
