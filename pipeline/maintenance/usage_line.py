"""`UsageLine`: what a part of the tier takes in the store. Lines add up by topic, partition or day."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DAY_MS = 86_400_000


class UsageBy(StrEnum):
    TOPIC = "topic"
    PARTITION = "partition"
    DAY = "day"


@dataclass(slots=True)
class UsageLine:
    """`day` counts from 1970 in UTC and is the day of a segment's latest record. None: objects without a time, or all
    days.

    `overhead_bytes` is the part of `log_bytes` that encryption adds. `unfinished_bytes` is the size of segments that
    are being copied or deleted, and `orphan_bytes` that of objects that no metadata knows. None: not listed."""

    topic: str
    topic_id: str
    partition: int | None
    day: int | None = None
    segments: int = 0
    log_bytes: int = 0
    overhead_bytes: int = 0
    index_bytes: int = 0
    facts_bytes: int = 0
    unfinished_bytes: int | None = 0
    orphan_bytes: int | None = 0

    @property
    def total_bytes(self) -> int:
        known = self.log_bytes + self.index_bytes + self.facts_bytes
        return known + (self.unfinished_bytes or 0) + (self.orphan_bytes or 0)

    def add(self, other: UsageLine) -> None:
        self.segments += other.segments
        self.log_bytes += other.log_bytes
        self.overhead_bytes += other.overhead_bytes
        self.index_bytes += other.index_bytes
        self.facts_bytes += other.facts_bytes
        self.unfinished_bytes = _sum(self.unfinished_bytes, other.unfinished_bytes)
        self.orphan_bytes = _sum(self.orphan_bytes, other.orphan_bytes)


def grouped(lines: Iterable[UsageLine], by: UsageBy | None) -> list[UsageLine]:
    """Adds lines up and returns them by topic, partition and day. `by` None: one line per partition and day."""
    found: dict[tuple[str, str, int, int], UsageLine] = {}
    for line in lines:
        partition = None if by in (UsageBy.TOPIC, UsageBy.DAY) else line.partition
        day = None if by in (UsageBy.TOPIC, UsageBy.PARTITION) else line.day
        key = line.topic, line.topic_id, -1 if partition is None else partition, -1 if day is None else day
        if key not in found:
            found[key] = UsageLine(line.topic, line.topic_id, partition, day)
        found[key].add(line)
    return [found[key] for key in sorted(found)]


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
