"""The answers of an explanation: where an offset is, and why a segment is where it is. Plain values, ready for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """Where an offset of the log is."""

    REMOTE = "remote"
    LOCAL = "local"
    BOTH = "both"
    DELETED = "deleted"
    """Below the log start: by retention, or by DeleteRecords."""
    GAP = "gap"
    """The broker removed the record before it was copied."""
    BEYOND_END = "beyond the end"
    UNKNOWN = "unknown"
    """The leader does not answer, or neither tier has the offset."""


class Question(StrEnum):
    ON_BROKER = "still on the broker"
    NOT_REMOTE = "not yet remote"
    NOT_EXPIRED = "not yet expired"


class StateReason(StrEnum):
    """Reasons beside `HoldReason`: states of a partition in which its tasks decide nothing, or have decided."""

    DUE = "due"
    """Nothing holds it: the owner does it in its next round."""
    BEHIND_EARLIER = "behind-earlier"
    NOT_TIERED = "not-tiered"
    STOPPED = "stopped"
    DOUBT = "doubt"
    UNPROVED_CUT = "unproved-cut"
    STAGE_FAILS = "stage-fails"
    NO_OWNER = "no-owner"
    OWNER_UNFIT = "owner-unfit"
    UNCOPIED_BEFORE = "uncopied-before"
    SHARE_GROUP = "share-group"
    OPEN_TRANSACTION = "open-transaction"
    COPY_BEGUN = "copy-begun"
    COPY_LEFT = "copy-left"
    DELETION_BEGUN = "deletion-begun"
    BELOW_LOG_START = "below-log-start"
    VOID = "void"
    SUPERSEDED = "superseded"
    LEADER_UNKNOWN = "leader-unknown"


@dataclass(frozen=True, slots=True)
class Why:
    """The answer to one question. `reason` is a value of `HoldReason` or `StateReason`: a name that does not change.

    `rule` cites docs/design.md.
    `at_ms` is the time (wall clock) at which the blocker ends by itself; None: that cannot be told."""

    question: Question
    reason: str
    rule: str
    sentence: str
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentAnswer:
    """One remote segment. `end_offset` is the last offset (inclusive) that may be read; if all of it is void, the last.

    `place` is REMOTE or BOTH for a readable segment, else UNKNOWN. `object` is the key of its log; empty: not known."""

    id: str
    start_offset: int
    end_offset: int
    size_bytes: int
    state: str
    place: Place
    object: str
    max_timestamp_ms: int
    leader_epochs: tuple[int, ...]
    whys: tuple[Why, ...]


@dataclass(frozen=True, slots=True)
class UncopiedAnswer:
    """The end of the log that is only local: [`first_offset`, `next_offset`). Empty if all of it is remote."""

    first_offset: int
    next_offset: int
    whys: tuple[Why, ...]


@dataclass(frozen=True, slots=True)
class OffsetAnswer:
    """Where one offset is.

    `segment` is the remote segment with the offset. `continues_at` is where a Fetch goes on, if the offset itself has
    no record any more."""

    offset: int
    place: Place
    sentence: str
    segment: SegmentAnswer | None = None
    continues_at: int | None = None
    whys: tuple[Why, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionAnswer:
    """All answers about one partition. A bound is None while it is not known (docs/design.md, "Words").

    `notes` are sentences about the whole partition: a stop, a failing stage, a pause, a leader that does not answer."""

    topic: str
    partition: int
    log_start: int
    remote_start: int | None
    remote_end: int | None
    local_log_start: int | None
    last_stable_offset: int | None
    high_watermark: int | None
    owner: str | None
    notes: tuple[str, ...]
    segments: tuple[SegmentAnswer, ...]
    uncopied: UncopiedAnswer
