"""`WrittenLog`: a partition's log that a test writes itself, with its transactions and its visible records.

`read_all` is a strict client. It reads from the remote tier from an offset on, as read_committed consumers do, and
compares bytes and visible records with the log.

Two other expectations know less of the log: `AcknowledgedRecords` of the drill sees the answers to producers, and
`ExpectedPartition` of the simulation follows a log that elections cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.in_memory_log import Aborted
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tests.support.read_committed import FILTERS
from tests.support.tiers.workbench import PARTITION
from tiers.broker.client import monotonic_ms
from tiers.errors import OffsetBelowLogStartError, OffsetGapError
from tiers.model.log_source import AbortedTransaction
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead, RemoteReadRequest

READ_TIMEOUT_MS = 30_000
"""A timeout on the real clock. Only a read of missing data takes this long."""


class Batch(NamedTuple):
    base_offset: int
    last_offset: int
    timestamp_ms: int
    producer_id: int
    """The producer of the batch's transaction. -1: the batch belongs to no transaction."""
    ends: str
    """"commit" or "abort" if the batch is a marker."""
    data: bytes


class WrittenLog:
    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.leader_epoch = 0

    @property
    def end_offset(self) -> int:
        return self.batches[-1].last_offset + 1 if self.batches else 0

    def append(self, records: int, timestamp_ms: int, producer_id: int = -1, *, value_bytes: int = 15) -> bytes:
        first = self.end_offset
        made = [
            record(first + i, timestamp_ms, value=(b"%d-" % (first + i)).ljust(value_bytes, b"x"))
            for i in range(records)
        ]
        data = build_batch(
            first,
            made,
            leader_epoch=self.leader_epoch,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            transactional=producer_id >= 0,
        )
        self.batches.append(Batch(first, first + records - 1, timestamp_ms, producer_id, "", data))
        return data

    def end_transaction(self, producer_id: int, timestamp_ms: int, *, commit: bool) -> bytes:
        offset = self.end_offset
        data = control_batch(
            offset,
            commit=commit,
            producer_id=producer_id,
            leader_epoch=self.leader_epoch,
            timestamp=timestamp_ms,
        )
        ends = "commit" if commit else "abort"
        self.batches.append(Batch(offset, offset, timestamp_ms, producer_id, ends, data))
        return data

    def open_transactions(self) -> dict[int, int]:
        """Returns the first offsets of the open transactions, by producer."""
        return _transactions(self.batches)[0]

    @property
    def last_stable_offset(self) -> int:
        return min(self.open_transactions().values(), default=self.end_offset)

    def aborted(self) -> list[Aborted]:
        return _transactions(self.batches)[1]

    def reports(self, first_offset: int, last_offset: int) -> list[AbortedTransaction]:
        """Returns the list of the leader with a fetch of these offsets (inclusive). Open transactions abort later."""
        still_open, aborted = _transactions(self.batches)
        later = (Aborted(producer, first, self.end_offset + producer) for producer, first in still_open.items())
        return [
            AbortedTransaction(one.producer_id, one.first_offset)
            for one in (*aborted, *later)
            if one.first_offset <= last_offset and one.marker_offset >= first_offset
        ]

    def bytes_of(self, first_offset: int, end_offset: int) -> bytes:
        """Returns the batches from that of `first_offset` to that of the last offset below `end_offset`."""
        if first_offset >= end_offset:
            return b""
        return b"".join(
            each.data for each in self.batches if each.last_offset >= first_offset and each.base_offset < end_offset
        )

    def size_bytes_from(self, offset: int) -> int:
        return len(self.bytes_of(offset, self.end_offset))

    def visible(self, first_offset: int, end_offset: int) -> list[int]:
        """Returns the offsets of the records that a read_committed client sees."""
        seen = []
        for batch in self.batches:
            of_aborted = any(
                one.producer_id == batch.producer_id and one.first_offset <= batch.base_offset < one.marker_offset
                for one in self.aborted()
            )
            if not batch.ends and not of_aborted:
                seen += [o for o in range(batch.base_offset, batch.last_offset + 1) if first_offset <= o < end_offset]
        return seen

    async def read_all(self, reader: RemoteLogReader, start: int, end: int, *, max_bytes: int = 700) -> None:
        """Reads every offset of [start, end) from the remote tier, which has all of them."""
        offset, served = start, b""
        visible: list[list[int]] = [[] for _ in FILTERS]
        while offset < end:
            read = await _read(reader, offset, max_bytes)
            answer = b"".join(bytes(view) for view in read.records)
            assert read.aborted_transactions is not None
            batches = list(iterate_batches(answer))
            for seen, shown in zip(visible, FILTERS, strict=True):
                for batch in shown(answer, batches, read.aborted_transactions):
                    seen += range(max(offset, batch.base_offset), min(end, batch.next_offset))
            offset = max(batch.next_offset for batch in batches)
            served += answer
        expected = self.bytes_of(start, end)
        assert served[: len(expected)] == expected, f"the remote tier returned other bytes for [{start}, {end})"
        assert visible == [self.visible(start, end)] * len(FILTERS)

    async def find_nothing_outside(self, reader: RemoteLogReader, start: int | None, remote_end: int | None) -> None:
        """Checks that the remote tier has no offset below `start` and none above `remote_end` (inclusive)."""
        if start is not None and start > 0:
            with pytest.raises(OffsetBelowLogStartError):
                await _read(reader, start - 1, 700)
        if start is not None and remote_end is not None and remote_end + 1 >= start:
            with pytest.raises(OffsetGapError):
                await _read(reader, remote_end + 1, 700)


async def _read(reader: RemoteLogReader, offset: int, max_bytes: int) -> RemoteRead:
    return await reader.read(
        RemoteReadRequest(
            PARTITION,
            offset,
            max_bytes,
            min_one_message=True,
            isolation_level=1,
            deadline_ms=monotonic_ms() + READ_TIMEOUT_MS,
            connection_id=1,
        )
    )


def _transactions(batches: Iterable[Batch]) -> tuple[dict[int, int], list[Aborted]]:
    """Returns the open transactions, and the aborted ones."""
    still_open: dict[int, int] = {}
    aborted = []
    for batch in batches:
        if batch.ends:
            first = still_open.pop(batch.producer_id, None)
            if first is not None and batch.ends == "abort":
                aborted.append(Aborted(batch.producer_id, first, batch.base_offset))
        elif batch.producer_id >= 0:
            still_open.setdefault(batch.producer_id, batch.base_offset)
    return still_open, aborted
