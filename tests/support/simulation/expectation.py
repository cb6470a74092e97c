"""`ExpectedPartition`: the one log of a user partition that clients must be able to read, and why records may be gone.

Records may be gone for these reasons only: the topic's retention, a user's DeleteRecords, the broker's removal of
records that were not copied yet, and an unclean election, which cuts the log.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.simulation.replica_log import Batch


class Retention(NamedTuple):
    ms: int
    size_bytes: int

    def is_shorter_than(self, other: Retention) -> bool:
        return self != other


class Cut(NamedTuple):
    """The committed records that an unclean election took: offsets from `first` to `end` (exclusive)."""

    first: int
    end: int
    deleted_to: int
    """Up to where users had deleted records of that history."""
    deleted_epoch: int
    """The leader epoch of the last record that they had deleted. -1: none."""
    lowest_epoch: int
    """The lowest leader epoch of the records."""
    highest_epoch: int


@dataclass
class ExpectedPartition:
    name: str
    retentions: list[Retention]
    """Every total retention that the topic ever had."""
    has_own_total: bool = False
    """Whether the topic has a total of its own, which is unlimited."""
    _of_brokers: list[Retention] = field(default_factory=list)
    """Every retention that the brokers had, while the topic has a total of its own."""
    batches: list[Batch] = field(default_factory=list)
    ever: dict[int, set[bytes]] = field(default_factory=dict)
    """By base offset: the bytes of every batch that was ever committed there."""
    end: int = 0
    """The highest next offset that was committed and not cut since."""
    deleted_to: int = 0
    """Up to where users asked to delete records."""
    confirmed_deletions: list[tuple[float, int]] = field(default_factory=list)
    """When users' deletions were answered without an error, and up to where."""
    deleted_without_epoch_to: int = 0
    """The part of them for which the leader changed, or an attempt failed: the log start may lack the last epoch."""
    trimmed_to: int = 0
    """Up to where a broker removed records by itself or for an administrator, or may have for Tidegate: the trim is on
    record. Removals for users do not count."""
    deletions_open: int = 0
    """How many deletions of users were not answered without an error. They may yet happen, also to another history."""
    removed: list[tuple[int, int]] = field(default_factory=list)
    """Runs of offsets, the ends exclusive, that a broker removed before they were copied."""
    histories: int = 1
    has_other_history: bool = False
    """Whether a leader came that lacks records which were trimmed from the brokers, or all records."""
    last_cut_s: float = -1e9
    cuts: list[Cut] = field(default_factory=list)
    may_reappear: bool = False
    """Whether a broker lost its log start: it has deleted records again until the owner deletes them again."""
    expired_to: int = 0
    """Up to where records had expired by size when an unclean election made the log shorter. They do not come back."""
    tolerance_ms: int = 0
    """By how much a process's clock may be ahead of the brokers'."""

    def commit(self, batch: Batch) -> None:
        if batch.base_offset < self.end:
            return
        self.batches.append(batch)
        self.ever.setdefault(batch.base_offset, set()).add(batch.data)
        self.end = batch.next_offset

    def cut(self, leader_batches: list[Batch], leader_start: int, leader_end: int, at_s: float) -> None:
        """Takes the log of a new leader from its start on. Below that, the log is what was there before."""
        known = {(one.base_offset, one.leader_epoch) for one in self.batches}
        below = [one for one in self.batches if one.next_offset <= leader_start]
        common = [one for one in leader_batches if (one.base_offset, one.leader_epoch) in known]
        ends_at = common[-1].next_offset if common else leader_start
        if self.end > ends_at:
            epochs = [one.leader_epoch for one in self.batches if one.next_offset > ends_at] or [0]
            deleted_epoch = self._epoch_at(self.deleted_to - 1)
            self.cuts.append(Cut(ends_at, self.end, self.deleted_to, deleted_epoch, min(epochs), max(epochs)))
            self.expired_to = max(self.expired_to, min(self._expired_by_size_to(), ends_at))
            self.histories += 1
            self.last_cut_s = at_s
            # What was deleted in one history deletes nothing in another. But a leader confirms a log start without a
            # last epoch that the uncommitted end of its old epoch reaches (docs/design.md, safety rule 5).
            is_old_end = (
                bool(common)
                and leader_end >= self.deleted_to == self.deleted_without_epoch_to
                and all(one.leader_epoch <= common[-1].leader_epoch for one in leader_batches)
            )
            if not self.deletions_open and not is_old_end:
                self.deleted_to = min(self.deleted_to, ends_at)
        self.batches = below if leader_end >= leader_start else []
        self.end = max([leader_start, *(one.next_offset for one in self.batches)])
        if not leader_batches and leader_end < ends_at:
            self.end = leader_end
        for batch in leader_batches:
            if batch.base_offset >= leader_start or batch.next_offset > leader_start:
                self.batches = [one for one in self.batches if one.next_offset <= batch.base_offset]
                self.batches.append(batch)
                self.ever.setdefault(batch.base_offset, set()).add(batch.data)
                self.end = batch.next_offset
        # A leader with the last record that users deleted has that history, and the deletion counts again.
        for cut in self.cuts:
            if cut.deleted_to > self.deleted_to and cut.deleted_epoch == self._epoch_at(cut.deleted_to - 1) >= 0:
                self.deleted_to = cut.deleted_to

    def change_retention(self, retention: Retention) -> None:
        """The brokers have another retention. It is the total, unless the topic has one of its own."""
        (self._of_brokers if self.has_own_total else self.retentions).append(retention)

    def take_own_total(self, now_ms: int) -> None:
        """From now on the total is unlimited. What may have expired does not come back."""
        expired = (one.next_offset for one in self.batches if self.may_have_expired(one, now_ms))
        self.expired_to = max(self.expired_to, *expired, 0)
        if not self.has_own_total:
            self._of_brokers = self.retentions
        self.has_own_total, self.retentions = True, [Retention(-1, -1)]

    def lose_own_total(self) -> None:
        """The metadata may have lost the total, and no facts have it. The brokers' retention is the total again."""
        self.has_own_total, self.retentions = False, self._of_brokers

    def _epoch_at(self, offset: int) -> int:
        """Returns the leader epoch of a record. -1: the log does not have the record."""
        batch = self.batch_at(offset)
        return -1 if batch is None or batch.base_offset > offset else batch.leader_epoch

    def confirmed_deleted_to(self, before_s: float) -> int:
        """Returns up to where deletions that were answered before then have deleted."""
        return max((offset for at_s, offset in self.confirmed_deletions if at_s < before_s), default=0)

    def size_from(self, offset: int) -> int:
        place = bisect_left(self.batches, offset + 1, key=lambda one: one.next_offset)
        return sum(len(one.data) for one in self.batches[place:])

    def may_be_gone(self, batch: Batch, now_ms: int) -> bool:
        if batch.next_offset <= self.deleted_to:
            return True
        return self.may_have_expired(batch, now_ms) or self.was_removed(batch)

    def _expired_by_size_to(self) -> int:
        sizes = [one.size_bytes for one in self.retentions if one.size_bytes >= 0]
        expired = (one.next_offset for one in self.batches if sizes and self.size_from(one.next_offset) >= min(sizes))
        return max(expired, default=0)

    def may_have_expired(self, batch: Batch, now_ms: int) -> bool:
        if batch.next_offset <= self.expired_to:
            return True
        for one in self.retentions:
            if one.ms >= 0 and now_ms + self.tolerance_ms - batch.timestamp_ms > one.ms:
                return True
            if one.size_bytes >= 0 and self.size_from(batch.next_offset) >= one.size_bytes:
                return True
        return False

    def was_removed(self, batch: Batch) -> bool:
        return any(first <= batch.base_offset and batch.next_offset <= end for first, end in self.removed)

    def log_start(self, now_ms: int) -> int:
        """Returns the lowest offset that must still be readable; the end if there is none."""
        for batch in self.batches:
            if not self.may_be_gone(batch, now_ms):
                return max(batch.base_offset, min(self.deleted_to, batch.next_offset - 1))
        return self.end

    def batch_at(self, offset: int) -> Batch | None:
        """Returns the batch that holds the offset, or the next one behind it."""
        place = bisect_left(self.batches, offset + 1, key=lambda one: one.next_offset)
        return self.batches[place] if place < len(self.batches) else None

    def deleted_of(self, batches: list[Batch]) -> int:
        """Returns up to where users have deleted records of the log of a former leader."""
        of_its_history = (
            cut.deleted_to
            for cut in self.cuts
            for one in batches
            if one.base_offset < cut.deleted_to <= one.next_offset and one.leader_epoch == cut.deleted_epoch
        )
        return max([self.deleted_to, *of_its_history])

    def lacking(self, first: int, end: int, now_ms: int) -> list[Batch]:
        """Returns the batches that begin before `end` and have offsets of [first, end) that must be readable."""
        place = bisect_left(self.batches, first + 1, key=lambda one: one.next_offset)
        found = []
        for batch in self.batches[place:]:
            if batch.base_offset >= end:
                break
            if min(batch.next_offset, end) > self.deleted_to and not self.may_be_gone(batch, now_ms):
                found.append(batch)
        return found
