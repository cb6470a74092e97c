"""`LogSource` over lists of batches: the leader's log of one partition, with settings for a leader's faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction, EpochEndOffset, LocalLogBounds, LogRead


@dataclass(frozen=True, slots=True)
class Aborted:
    producer_id: int
    first_offset: int
    marker_offset: int


@dataclass
class InMemoryLog:
    """A leader's log. `last_stable_offset` None: the log end. `epoch_ends` None: computed from the batches."""

    records: bytes = b""
    log_start_offset: int = 0
    last_stable_offset: int | None = None
    leader_epoch: int = 0
    aborted: list[Aborted] = field(default_factory=list)
    elections: dict[int, int] = field(default_factory=dict)
    """Leader epochs with their start offsets. It names those whose first records a compaction has removed."""
    epoch_answer: EpochEndOffset | None = None
    failure: Exception | None = None
    reads: list[int] = field(default_factory=list)
    surveys: int = 0
    """How often the bounds were asked for."""
    trims: list[int] = field(default_factory=list)
    has_size_right: bool = True
    """Whether the broker answers the size of the log."""
    has_large_files: bool = False
    """Whether the size counts records below the log start, which stay until `remove_files`."""

    def append(self, *batches: bytes) -> None:
        self.records += b"".join(batches)

    @property
    def end_offset(self) -> int:
        return max((batch.next_offset for batch in iterate_batches(self.records)), default=0)

    @property
    def lso(self) -> int:
        return self.end_offset if self.last_stable_offset is None else self.last_stable_offset

    def bytes_of(self, first: int, last: int) -> bytes:
        """Returns the batches from the one that holds `first` to the one that ends with `last`."""
        batches = [b for b in iterate_batches(self.records) if b.last_offset >= first and b.base_offset <= last]
        return self.records[batches[0].start : batches[-1].end]

    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        self.surveys += 1
        self._fail()
        return LocalLogBounds(self.log_start_offset, self.lso, self.end_offset, self.leader_epoch)

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        start = 0 if self.has_large_files else self.log_start_offset
        size_bytes = sum(each.size_bytes for each in iterate_batches(self.records) if each.last_offset >= start)
        return size_bytes if self.has_size_right else None

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        self._fail()
        self.reads.append(offset)
        if offset < self.log_start_offset:
            raise OffsetGapError(f"{offset} < {self.log_start_offset}")
        if offset > self.end_offset:
            raise LogDivergedError(f"{offset} > {self.end_offset}")
        taken = bytearray()
        last = offset
        for batch in iterate_batches(self.records):
            if batch.last_offset < offset or batch.next_offset > self.lso:
                continue
            if taken and len(taken) + batch.size_bytes > max_bytes:
                break
            taken += self.records[batch.start : batch.end]
            last = batch.last_offset
        reported = [one for one in self.aborted if one.marker_offset >= offset and one.first_offset <= last]
        return LogRead(
            records=bytes(taken),
            log_start_offset=self.log_start_offset,
            last_stable_offset=self.lso,
            high_watermark=self.end_offset,
            leader_epoch=self.leader_epoch,
            aborted_transactions=tuple(AbortedTransaction(one.producer_id, one.first_offset) for one in reported),
        )

    async def end_offset_for_epoch(
        self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int
    ) -> EpochEndOffset:
        self._fail()
        if self.epoch_answer is not None:
            return self.epoch_answer
        epochs = self._epoch_starts()
        if leader_epoch < 0:
            return EpochEndOffset(-1, -1)
        if leader_epoch >= max(epochs):
            known = leader_epoch in epochs
            return EpochEndOffset(leader_epoch, self.end_offset) if known else EpochEndOffset(-1, -1)
        end = min(start for epoch, start in epochs.items() if epoch > leader_epoch)
        return EpochEndOffset(max((epoch for epoch in epochs if epoch <= leader_epoch), default=leader_epoch), end)

    def _epoch_starts(self) -> dict[int, int]:
        """Returns the epochs with their start offsets, as a broker's LeaderEpochFileCache has them.

        It forgets epochs whose records were removed by DeleteRecords (docs/semantics.md 6.2)."""
        starts: dict[int, int] = {}
        for batch in iterate_batches(self.records):
            if batch.last_offset >= self.log_start_offset:
                starts.setdefault(batch.leader_epoch, max(batch.base_offset, self.log_start_offset))
        covering = max((epoch for epoch, start in self.elections.items() if start <= self.log_start_offset), default=-1)
        starts |= {e: max(start, self.log_start_offset) for e, start in self.elections.items() if e >= covering}
        if self.leader_epoch > max(starts, default=-1):
            starts[self.leader_epoch] = max(self.end_offset, self.log_start_offset)
        return starts

    def elect_unclean(self, end_offset: int) -> None:
        """Elects a replica whose log ends at `end_offset`, or at the end of an earlier batch."""
        batches = [b for b in iterate_batches(self.records) if b.next_offset <= end_offset]
        self.records = self.records[: batches[-1].end] if batches else b""
        self.leader_epoch += 1

    def remove_files(self, file_bytes: int, retention_bytes: int | None = None) -> None:
        """Removes records as a broker does: whole files of about `file_bytes`, below the log start or by size."""
        while (file := self._first_file(file_bytes)) is not None:
            end_offset, size_bytes = file
            too_much = retention_bytes is not None and len(self.records) - size_bytes >= retention_bytes
            if end_offset > self.log_start_offset and not too_much:
                return
            self.records = self.records[size_bytes:]
            self.log_start_offset = max(self.log_start_offset, end_offset)

    def _first_file(self, file_bytes: int) -> tuple[int, int] | None:
        """Returns the next offset and the size of the first file. None: the broker still writes to it."""
        for batch in iterate_batches(self.records):
            if batch.end >= file_bytes and batch.end < len(self.records):
                return batch.next_offset, batch.end
        return None

    async def delete_records(
        self,
        partition: TopicIdPartition,
        offset: int,
        leader_epoch: int,
        timeout_ms: int,
        check_ownership: Callable[[], None],
    ) -> int:
        self._fail()
        check_ownership()
        if leader_epoch != self.leader_epoch:
            raise BrokerError("fenced", ErrorCode.FENCED_LEADER_EPOCH)
        self.trims.append(offset)
        self.log_start_offset = max(self.log_start_offset, offset)
        return self.log_start_offset

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class DamagedLog(InMemoryLog):
    """A log of which a broker cannot read one batch."""

    damaged_offset = -1

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        read = await super().read(partition, offset, max_bytes, timeout_ms)
        if any(batch.base_offset == self.damaged_offset for batch in iterate_batches(read.records)):
            raise BrokerError("CRC", ErrorCode.CORRUPT_MESSAGE)
        return read
