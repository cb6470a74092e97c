"""`ReplicaLog`: the log of one partition on one broker, by Kafka's rules (docs/semantics.md 3.1, 6, 7)."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import google_crc32c

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import control_batch

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
DATA, COMMIT, ABORT = "", "commit", "abort"
NO_EPOCH = -1


class Batch(NamedTuple):
    base_offset: int
    next_offset: int
    leader_epoch: int
    producer_id: int
    """-1: the batch belongs to no transaction."""
    producer_epoch: int
    base_sequence: int
    ends: str
    """"commit" or "abort" if the batch is a marker."""
    timestamp_ms: int
    data: bytes


class AbortedInLog(NamedTuple):
    first_offset: int
    producer_id: int
    marker_offset: int


def placed(data: bytes, base_offset: int, leader_epoch: int, log_append_time_ms: int | None = None) -> Batch:
    """Returns a producer's batch as the leader stores it. Offset and epoch lie outside of the checksum."""
    raw = bytearray(data)
    _BASE_OFFSET.pack_into(raw, 0, base_offset)
    _LEADER_EPOCH.pack_into(raw, 12, leader_epoch)
    if log_append_time_ms is not None:
        _set_append_time(raw, log_append_time_ms)
    view = next(iter(iterate_batches(bytes(raw))))
    producer_id = view.producer_id if view.is_transactional else -1
    return Batch(
        base_offset, view.next_offset, leader_epoch, producer_id, view.producer_epoch, view.base_sequence, DATA,
        view.max_timestamp, bytes(raw),
    )  # fmt: skip


def _set_append_time(raw: bytearray, at_ms: int) -> None:
    (attributes,) = struct.unpack_from(">h", raw, 21)
    struct.pack_into(">h", raw, 21, attributes | 8)
    struct.pack_into(">q", raw, 35, at_ms)
    struct.pack_into(">I", raw, 17, google_crc32c.value(bytes(raw[21:])))


def marker(base_offset: int, leader_epoch: int, producer_id: int, producer_epoch: int, ends: str, at_ms: int) -> Batch:
    data = control_batch(
        base_offset,
        commit=ends == COMMIT,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        leader_epoch=leader_epoch,
        timestamp=at_ms,
    )
    return Batch(base_offset, base_offset + 1, leader_epoch, producer_id, producer_epoch, -1, ends, at_ms, data)


@dataclass
class ReplicaLog:
    batches: list[Batch] = field(default_factory=list)
    start: int = 0
    end: int = 0
    high_watermark: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """The leader epochs with their start offsets."""
    still_open: dict[int, int] = field(default_factory=dict)
    """The first offsets of open transactions, by producer id."""
    aborted: list[AbortedInLog] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    """The first offsets of ended transactions, and the offsets of their markers."""
    producer_epochs: dict[int, int] = field(default_factory=dict)
    """The last epoch of each transactional producer. A trim does not forget it."""
    trimmed: list[Batch] = field(default_factory=list)
    """The last removed batches: an unclean stop of the broker may bring them back."""
    delete_horizons_ms: dict[int, int] = field(default_factory=dict)
    """By offset: until when the cleaner keeps a tombstone or a marker."""

    def append(self, batch: Batch) -> None:
        assert batch.base_offset >= self.end, (batch, self.end)
        if not self.epochs or self.epochs[-1][0] < batch.leader_epoch:
            self.assign_epoch(batch.leader_epoch, batch.base_offset)
        self.batches.append(batch)
        self.end = batch.next_offset
        self._track(batch)

    def _track(self, batch: Batch) -> None:
        if batch.producer_id >= 0:
            self.producer_epochs[batch.producer_id] = batch.producer_epoch
        if batch.ends:
            first = self.still_open.pop(batch.producer_id, None)
            if first is not None:
                self.ended.append((first, batch.base_offset))
            if first is not None and batch.ends == ABORT:
                self.aborted.append(AbortedInLog(first, batch.producer_id, batch.base_offset))
        elif batch.producer_id >= 0:
            self.still_open.setdefault(batch.producer_id, batch.base_offset)

    def assign_epoch(self, leader_epoch: int, start: int) -> None:
        """As `LeaderEpochFileCache.assign`: an epoch without records gives way to the next one."""
        while self.epochs and (self.epochs[-1][1] >= start or self.epochs[-1][0] >= leader_epoch):
            self.epochs.pop()
        self.epochs.append((leader_epoch, start))

    @property
    def size_bytes(self) -> int:
        return sum(len(one.data) for one in self.batches)

    @property
    def latest_epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else NO_EPOCH

    @property
    def last_stable_offset(self) -> int:
        """Where the first transaction begins that has no marker below the high watermark."""
        if not self.ended and not self.still_open:
            return max(self.high_watermark, self.start)
        if self.ended:
            self.ended = [one for one in self.ended if one[1] >= self.high_watermark]
        unstable = min([self.high_watermark, *self.still_open.values(), *(first for first, _ in self.ended)])
        return max(unstable, self.start)

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """As `LeaderEpochFileCache.endOffsetFor` (docs/semantics.md 6.1)."""
        if epoch < 0 or not self.epochs or epoch > self.latest_epoch:
            return -1, -1
        if epoch == self.latest_epoch:
            return epoch, self.end
        place = bisect_right(self.epochs, epoch, key=lambda one: one[0])
        if place == 0:
            return epoch, self.epochs[0][1]
        return self.epochs[place - 1][0], self.epochs[place][1]

    def truncate_to(self, offset: int) -> list[Batch]:
        """Cuts the end of the log, at the end of a batch. Returns the batches that are lost."""
        kept = bisect_left(self.batches, offset + 1, key=lambda one: one.next_offset)
        lost, self.batches = self.batches[kept:], self.batches[:kept]
        if not lost and self.end <= offset:
            return []
        self.end = self.batches[-1].next_offset if self.batches else max(self.start, min(offset, self.end))
        self.high_watermark = min(self.high_watermark, self.end)
        while self.epochs and self.epochs[-1][1] >= self.end:
            self.epochs.pop()
        self.still_open, self.aborted, self.ended, self.producer_epochs = {}, [], [], {}
        for batch in self.batches:
            self._track(batch)
        return lost

    def reset_to(self, offset: int) -> None:
        """Begins anew at an offset, as a follower does whose log ends before the leader's begins."""
        self.batches, self.epochs, self.trimmed = [], [], []
        self.still_open, self.aborted, self.ended = {}, [], []
        self.start = self.end = self.high_watermark = offset

    def trim_to(self, offset: int) -> list[Batch]:
        """Moves the log start. Returns the batches that lie wholly below it (docs/semantics.md 6.2)."""
        if offset <= self.start:
            return []
        self.start = offset
        gone = bisect_left(self.batches, offset + 1, key=lambda one: one.next_offset)
        removed, self.batches = self.batches[:gone], self.batches[gone:]
        self.trimmed = [*self.trimmed, *removed][-40:]
        self.end = max(self.end, offset)
        below = [one for one in self.epochs if one[1] <= offset]
        if below:
            self.epochs[: len(below)] = [(below[-1][0], offset)]
        return removed

    def bring_back(self, count: int) -> None:
        """Takes up to `count` of the batches back that were removed last, as a log has them that was not flushed.

        Their leader epochs do not come back: Kafka writes the list of epochs at once, and the log start later."""
        if not self.batches or self.start != self.batches[0].base_offset:
            return
        back: list[Batch] = []
        begins_at = self.start
        for batch in reversed(self.trimmed):
            if batch.next_offset == begins_at and len(back) < count:
                back.insert(0, batch)
                begins_at = batch.base_offset
        if not back:
            return
        self.trimmed = [one for one in self.trimmed if one not in back]
        self.batches, self.start = [*back, *self.batches], begins_at

    def read(self, offset: int, bound: int, max_bytes: int, min_one: bool) -> tuple[bytes, int]:
        """Returns the batches from the one of `offset` on below `bound`, and the offset behind them."""
        if not self.batches or self.batches[-1].next_offset <= offset:
            return b"", offset
        out: list[bytes] = []
        size, next_offset = 0, offset
        place = bisect_left(self.batches, offset + 1, key=lambda one: one.next_offset)
        for batch in self.batches[place:]:
            if batch.next_offset > bound:
                break
            if size + len(batch.data) > max_bytes and (out or not min_one):
                break
            out.append(batch.data)
            size += len(batch.data)
            next_offset = batch.next_offset
        return b"".join(out), next_offset

    def batch_start(self, offset: int) -> int | None:
        """Returns the first offset of the batch that holds `offset`; None without one."""
        return next((one.base_offset for one in self.batches if one.base_offset <= offset < one.next_offset), None)

    def aborted_between(self, first_offset: int, next_offset: int) -> list[tuple[int, int]]:
        """Returns (producer id, first offset) of the aborted transactions that overlap the offsets."""
        return [
            (one.producer_id, one.first_offset)
            for one in sorted(self.aborted)
            if one.first_offset < next_offset and one.marker_offset >= first_offset
        ]
