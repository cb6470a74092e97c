"""`wanted_batches`: yields the batches that may hold records that a reader asked for.

The decision uses batch headers only and decompresses nothing. CRCs are checked first, because a flipped bit in a header
could make a batch look unwanted. Transactions are judged as in Kafka's consumers (KIP-98): an aborted transaction is
its producer's batches from its first offset to its ABORT marker. Batches of that producer after the marker belong to
another transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

from protocol.errors import CorruptBatchError
from protocol.primitives import Buffer
from protocol.records.record_batch import RecordBatch, crc_matches, iterate_batches
from protocol.records.record_reader import read_records
from tiers.segment.indexes.segment_index import AbortedTransactionRange

MAX_OFFSET = (1 << 63) - 1

_CONTROL_KEY = Struct(">hh")
_ABORT = 0


class CorruptRecordsError(CorruptBatchError):
    """A batch cannot be read. `offset` is where it begins; all batches before it were read."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"the batch at offset {offset}: {reason}")
        self.offset = offset


class AbortedTransactions:
    """The aborted ranges that are still open, by producer."""

    def __init__(self, ranges: Sequence[AbortedTransactionRange]) -> None:
        self._ranges: dict[int, list[AbortedTransactionRange]] = {}
        for one in ranges:
            self._ranges.setdefault(one.producer_id, []).append(one)

    def hold(self, batch: RecordBatch) -> bool:
        return batch.is_transactional and any(
            one.first_offset <= batch.last_offset and batch.base_offset <= one.last_offset
            for one in self._ranges.get(batch.producer_id, ())
        )

    def pass_marker(self, buf: Buffer, marker: RecordBatch) -> None:
        """Handles a control batch. An ABORT marker ends its producer's ranges that began before it, so that a range
        without a known end does not extend past the marker."""
        begun = self._ranges.get(marker.producer_id)
        if begun and _is_abort(buf, marker):
            self._ranges[marker.producer_id] = [one for one in begun if one.first_offset > marker.last_offset]


def _is_abort(buf: Buffer, marker: RecordBatch) -> bool:
    return any(
        record.key is not None
        and len(record.key) >= _CONTROL_KEY.size
        and _CONTROL_KEY.unpack_from(record.key)[1] == _ABORT
        for record in read_records(buf, marker)
    )


def wanted_batches(
    data: Buffer,
    first_offset: int,
    end_offset: int,
    aborted: AbortedTransactions | None,
    min_timestamp_ms: int | None,
    checked: Iterable[RecordBatch] | None = None,
) -> Iterator[RecordBatch]:
    """Yields batches in offset order. Both offsets are inclusive. If `aborted` is None, records of aborted transactions
    are wanted too.

    `checked` holds the batches up to the end of `data`, if the caller has already compared them with their CRCs.

    Batches beyond `end_offset` are not read. Raises `CorruptRecordsError` if the bytes are not whole batches with
    ascending offsets and matching CRCs.
    """
    view = memoryview(data)
    next_offset = 0
    next_position = 0
    try:
        for batch in iterate_batches(data) if checked is None else checked:
            next_position = batch.end
            if batch.magic == 2 and batch.base_offset > end_offset:
                return
            if checked is None and not crc_matches(view, batch):
                raise CorruptRecordsError(batch.base_offset, "its CRC does not match")
            if batch.last_offset > MAX_OFFSET:
                raise CorruptRecordsError(batch.base_offset, f"it ends at the impossible offset {batch.last_offset}")
            if batch.base_offset < next_offset:
                raise CorruptRecordsError(batch.base_offset, f"it follows offset {next_offset - 1}")
            next_offset = batch.next_offset
            if batch.is_control:
                if aborted is not None:
                    aborted.pass_marker(data, batch)
                continue
            if batch.last_offset < first_offset or (aborted is not None and aborted.hold(batch)):
                continue
            if min_timestamp_ms is not None and batch.max_timestamp < min_timestamp_ms:
                continue
            yield batch
    except CorruptRecordsError:
        raise
    except CorruptBatchError as error:
        raise CorruptRecordsError(max(next_offset, first_offset), str(error)) from error
    if next_position != len(data):
        raise CorruptRecordsError(
            max(next_offset, first_offset), f"{len(data) - next_position} bytes at {next_position} are no whole batch"
        )
