"""The sentence and the rule of docs/design.md for every reason of an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from tiers.config.paused_work import TierWork
from tiers.explain.answers import Question, StateReason, Why
from tiers.tasks.hold import Hold, HoldReason

_RULE_1: Final = "docs/design.md, safety rule 1 (Visible before trimmed)"
_RULE_2: Final = "docs/design.md, safety rule 2 (Divergence deletes nothing)"
_RULE_3: Final = "docs/design.md, safety rule 3 (Only named objects are deleted)"
_RULE_4: Final = "docs/design.md, safety rule 4 (Trim what you own, where you think it is)"
_RULE_5: Final = "docs/design.md, safety rule 5 (Gaps cost only their own records)"
_RULE_6: Final = "docs/design.md, safety rule 6 (Clocks)"
_LOG_RANGE: Final = "docs/design.md, 'Log range'"
_OWNERSHIP: Final = "docs/design.md, 'Ownership'"
_OBJECTS: Final = "docs/design.md, 'Objects'"
_REJECTED: Final = "docs/design.md, 'Rejected'"

RULES: Final[Mapping[str, str]] = {
    HoldReason.COPY_DISABLED: _LOG_RANGE,
    HoldReason.COPYING_PAUSED: _LOG_RANGE,
    HoldReason.SEGMENT_OPEN: _LOG_RANGE,
    HoldReason.LEFTOVERS_STAY: _RULE_3,
    HoldReason.NO_LOCAL_RETENTION: _LOG_RANGE,
    HoldReason.TRIMMING_PAUSED: _LOG_RANGE,
    HoldReason.LOG_START_ABOVE: _LOG_RANGE,
    HoldReason.NOT_IN_MANIFEST: _LOG_RANGE,
    HoldReason.NOT_VISIBLE: _RULE_1,
    HoldReason.ABOVE_LSO: _RULE_4,
    HoldReason.LOCAL_RETENTION: _LOG_RANGE,
    HoldReason.NEWEST_SEGMENT: _RULE_4,
    HoldReason.EXPIRING_PAUSED: _LOG_RANGE,
    HoldReason.RETENTION_UNKNOWN: _LOG_RANGE,
    HoldReason.UNLIMITED_RETENTION: _LOG_RANGE,
    HoldReason.TOTAL_RETENTION: _LOG_RANGE,
    HoldReason.EXPIRY_BUDGET: _RULE_6,
    StateReason.DUE: _LOG_RANGE,
    StateReason.BEHIND_EARLIER: _RULE_4,
    StateReason.NOT_TIERED: _REJECTED,
    StateReason.STOPPED: _RULE_2,
    StateReason.STAGE_FAILS: _LOG_RANGE,
    StateReason.NO_OWNER: _OWNERSHIP,
    StateReason.UNCOPIED_BEFORE: _RULE_4,
    StateReason.SHARE_GROUP: _RULE_4,
    StateReason.OPEN_TRANSACTION: _LOG_RANGE,
    StateReason.COPY_BEGUN: _LOG_RANGE,
    StateReason.COPY_LEFT: _RULE_3,
    StateReason.DELETION_BEGUN: _OBJECTS,
    StateReason.BELOW_LOG_START: _LOG_RANGE,
    StateReason.QUARANTINE: _RULE_2,
    StateReason.SUPERSEDED: _LOG_RANGE,
    StateReason.LEADER_UNKNOWN: _RULE_5,
}
"""The place in the documentation that states the rule, by reason."""


def why(
    question: Question,
    reason: str,
    sentence: str,
    values: Mapping[str, int] | None = None,
    at_ms: int | None = None,
) -> Why:
    return Why(question, reason, RULES[reason], sentence, values or {}, at_ms)


def why_held(question: Question, hold: Hold) -> Why:
    return why(question, hold.reason, sentence_of(hold), hold.values, hold.at_ms)


def sentence_of(hold: Hold) -> str:
    values = hold.values
    match hold.reason:
        case HoldReason.COPY_DISABLED:
            return "The topic has remote.log.copy.disable=true, so the owner copies nothing of it."
        case HoldReason.COPYING_PAUSED:
            return _paused(TierWork.COPYING, "copies nothing of the topic")
        case HoldReason.SEGMENT_OPEN:
            return (
                "The owner copies a segment when it has segment.bytes, or when it is open for segment.ms "
                f"({duration_text(values['segment.ms'])}). The open segment is neither full nor old enough."
            )
        case HoldReason.LEFTOVERS_STAY:
            return "The store keeps objects of the last attempt at this copy, so the next attempt waits."
        case HoldReason.NO_LOCAL_RETENTION:
            return (
                "The topic has no local.retention.ms and no local.retention.bytes, so the owner trims nothing. The "
                "broker keeps the records for its own retention."
            )
        case HoldReason.TRIMMING_PAUSED:
            return _paused(TierWork.TRIMMING, "trims nothing of the topic")
        case HoldReason.LOG_START_ABOVE:
            return "The log start lies above these records. The owner deletes them on the broker in its next round."
        case HoldReason.NOT_IN_MANIFEST:
            return "The partition manifest in the store does not name the segment yet. The owner writes it first."
        case HoldReason.NOT_VISIBLE:
            return (
                f"The owner trims a segment {duration_text(values['remote.log.visible.after.ms'])} after the end of its"
                " copy, so that every proxy knows the copy first."
            )
        case HoldReason.ABOVE_LSO:
            return (
                f"The segment reaches the last stable offset {values['last_stable_offset']}. The owner trims only below"
                " it."
            )
        case HoldReason.LOCAL_RETENTION:
            return f"The local retention covers the segment: {_retention(values, 'local.retention.')}."
        case HoldReason.NEWEST_SEGMENT:
            return "The newest copied segment always stays on the broker."
        case HoldReason.EXPIRING_PAUSED:
            return _paused(TierWork.EXPIRING, "expires nothing of the topic")
        case HoldReason.RETENTION_UNKNOWN:
            return "The total retention is not agreed on, so nothing of the topic expires (`tidegate tier retention`)."
        case HoldReason.UNLIMITED_RETENTION:
            return "The total retention is unlimited in time and in bytes."
        case HoldReason.TOTAL_RETENTION:
            return f"The total retention covers the segment: {_retention(values, 'retention_')}."
        case HoldReason.EXPIRY_BUDGET:
            return "One round of the owner expires a limited number of bytes. The next round goes on."


def _paused(work: TierWork, consequence: str) -> str:
    return (
        f"An operator paused {work.value}, so the owner {consequence}: `tidegate tier resume TOPIC --{work.value}` ends"
        " the pause."
    )


def _retention(values: Mapping[str, int], prefix: str) -> str:
    parts = []
    if f"{prefix}ms" in values:
        age_ms, keep_ms = values["age_ms"], values[f"{prefix}ms"]
        parts.append(f"its newest record is {duration_text(age_ms)} old, of {duration_text(keep_ms)}")
    if f"{prefix}bytes" in values:
        parts.append(f"{values['later_bytes']} bytes follow it, of {values[f'{prefix}bytes']}")
    return ", and ".join(parts)


def duration_text(ms: int) -> str:
    """Returns a duration with its largest two units, such as `2 d 3 h`."""
    if ms < 0:
        return f"-{duration_text(-ms)}"
    if ms < 1000:
        return f"{ms} ms"
    parts, rest_s = [], ms // 1000
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest_s = divmod(rest_s, length_s)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def moment_text(time_ms: int) -> str:
    """Returns a time in UTC, with seconds."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
