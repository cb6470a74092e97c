"""The sentence and the rule of docs/design.md for every reason of an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tiers.config.topic_policy import COPY_LAG_BYTES, COPY_LAG_MS, TierWork, TopicPolicy, resume_command
from tiers.config.topic_settings import LOCAL_RETENTION_BYTES, LOCAL_RETENTION_MS
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.explain.answers import Question, StateReason, Why
from tiers.tasks.hold import Hold, HoldReason
from tiers.texts import duration_text, moment_text, size_text

_RULE_1: Final = "docs/design.md, safety rule 1 (Visible before trimmed)"
_RULE_2: Final = "docs/design.md, safety rule 2 (Divergence deletes nothing)"
_RULE_4: Final = "docs/design.md, safety rule 4 (Trim only as the owner, and only the log that was compared)"
_RULE_5: Final = "docs/design.md, safety rule 5 (Gaps cost only their own records)"
_RULE_6: Final = "docs/design.md, safety rule 6 (Clocks)"
_OWNERSHIP: Final = "docs/design.md, 'Ownership'"

RULES: Final[Mapping[str, str]] = {
    HoldReason.NOT_VISIBLE: _RULE_1,
    HoldReason.ABOVE_LSO: _RULE_4,
    HoldReason.NEWEST_SEGMENT: _RULE_4,
    HoldReason.FUTURE_TIMESTAMP: _RULE_6,
    HoldReason.EXPIRY_BUDGET: _RULE_6,
    StateReason.BEHIND_EARLIER: _RULE_4,
    StateReason.NOT_TIERED: "docs/configuration.md, [[topics]]",
    StateReason.STOPPED: _RULE_2,
    StateReason.DOUBT: _RULE_5,
    StateReason.UNPROVED_CUT: _RULE_2,
    StateReason.NO_OWNER: _OWNERSHIP,
    StateReason.OWNER_UNFIT: _OWNERSHIP,
    StateReason.UNCOPIED_BEFORE: _RULE_4,
    StateReason.SHARE_GROUP: _RULE_4,
    StateReason.COPY_LEFT: "docs/design.md, safety rule 3 (Only named objects are deleted)",
    StateReason.DELETION_BEGUN: "docs/design.md, 'Objects'",
    StateReason.VOID: _RULE_2,
    StateReason.LEADER_UNKNOWN: _RULE_5,
}
"""The place in the documentation that states the rule, by reason; "Log range" has the rules of all others."""


def why(question: Question, reason: str, sentence: str, at_ms: int | None = None) -> Why:
    return Why(question, reason, RULES.get(reason, "docs/design.md, 'Log range'"), sentence, at_ms)


def why_held(question: Question, hold: Hold, policy: TopicPolicy) -> Why:
    return why(question, hold.reason, sentence_of(hold, policy), hold.at_ms)


def sentence_of(hold: Hold, policy: TopicPolicy) -> str:
    values = hold.values
    match hold.reason:
        case HoldReason.COPY_DISABLED:
            return "The topic has remote.log.copy.disable=true, so the owner copies nothing of it."
        case HoldReason.COPYING_PAUSED:
            return _paused(policy, TierWork.COPYING, "copies nothing of the topic")
        case HoldReason.NOT_DUE:
            if COPY_LAG_MS in values:
                return (
                    f"The topic's {COPY_LAG_MS} ({values[COPY_LAG_MS]}) and {COPY_LAG_BYTES} ({values[COPY_LAG_BYTES]})"
                    " delay the copy."
                )
            said = "These are still too few and too new."
            if hold.at_ms is None:
                said = "The owner alone knows the size of these, and how old they are."
            return (
                f"The owner copies records when they have segment.bytes of the settings file ({policy.segment_bytes}),"
                f" or when the oldest one is segment.ms old ({duration_text(values['segment.ms'])}). {said}"
            )
        case HoldReason.NO_LOCAL_RETENTION:
            return (
                "The topic has no local.retention.ms and no local.retention.bytes, so the owner trims nothing. The "
                "broker keeps the records for its own retention."
            )
        case HoldReason.TRIMMING_PAUSED:
            return _paused(policy, TierWork.TRIMMING, "trims nothing of the topic")
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
            return f"The local retention covers the segment. {_local_retention(values, policy)}"
        case HoldReason.NEWEST_SEGMENT:
            return "The newest copied segment always stays on the broker."
        case HoldReason.EXPIRING_PAUSED:
            return _paused(policy, TierWork.EXPIRING, "expires nothing of the topic")
        case HoldReason.RETENTION_UNKNOWN:
            why_not = policy.total_conflict or f"the total of the file, {policy.total_to_record}, is not recorded yet"
            return f"The total retention is not agreed on, so nothing of the topic expires: {why_not}."
        case HoldReason.RETENTION_IN_DOUBT:
            return (
                "The owner could not read the topic's present retention: the brokers do not answer, or they disagree."
                " Until it can, nothing of the topic expires."
            )
        case HoldReason.UNLIMITED_RETENTION:
            return "The total retention is unlimited in time and in bytes."
        case HoldReason.TOTAL_RETENTION:
            return f"The total retention covers the segment. {_total_retention(values, policy)}"
        case HoldReason.FUTURE_TIMESTAMP:
            return (
                f"A record of the segment has a timestamp in the future: {moment_text(values['max_timestamp_ms'])}. As "
                f"in Kafka, it keeps the segment and all later ones. {_total_retention(values, policy)}"
            )
        case HoldReason.EXPIRY_BUDGET:
            return "One round of the owner expires a limited number of bytes. The next round goes on."


def _paused(policy: TopicPolicy, work: TierWork, consequence: str) -> str:
    return (
        f"An operator paused {work.value}, so the owner {consequence}: `{resume_command(policy.topic, [work])}` ends"
        " the pause."
    )


def _local_retention(values: Mapping[str, int], policy: TopicPolicy) -> str:
    def said(key: str) -> str:
        return f"{key}, from the {'topic' if key in policy.tier_settings else 'file'}"

    age, size = (LOCAL_RETENTION_MS, said(LOCAL_RETENTION_MS)), (LOCAL_RETENTION_BYTES, said(LOCAL_RETENTION_BYTES))
    return _goes("The owner may trim it", values, age, size)


def _total_retention(values: Mapping[str, int], policy: TopicPolicy) -> str:
    """The values are those of the recorded total, or of the broker's own retention if no total is recorded."""
    of_age = "retention.ms" if policy.recorded_total.minutes is None else RETENTION_MINUTES
    of_size = "retention.bytes" if policy.recorded_total.size_bytes is None else RETENTION_BYTES
    return _goes("It expires", values, ("retention_ms", of_age), ("retention_bytes", of_size))


def _goes(what: str, values: Mapping[str, int], age: tuple[str, str], size: tuple[str, str]) -> str:
    """`age` and `size` are the name of a value, and the setting that it comes from. A value may be missing."""
    ways = []
    if age[0] in values:
        keep, now = duration_text(values[age[0]]), duration_text(values["age_ms"])
        ways.append(f"when its newest record is {keep} old ({age[1]}); it is {now} old now")
    if size[0] in values:
        keep, more = size_text(values[size[0]]), size_text(values[size[0]] - values["later_bytes"])
        ways.append(f"when another {more} follow it in its partition ({size[1]}: {keep} per partition)")
    return f"{what} {', or '.join(ways)}."
