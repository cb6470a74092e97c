"""The tiered topics of the file, and `TopicPolicy`: one topic's settings from the file's rules and the broker.

* The first rule that matches decides. Tier settings of the topic itself (docs/semantics.md 9.4) override it key by key.
* `retention.*` are the broker's and mean the total over both tiers, unless the topic has a total of its own
  (`remote.log.retention.*`): then they bound the local tier alone. `local.retention.*` are Tidegate's.
* Only topics with `cleanup.policy=delete` alone can be tiered: compaction changes old offsets after they were copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final
from uuid import UUID

from pydantic import AliasChoices, Field, model_validator

from tiers.config.setting_keys import key_of
from tiers.config.settings import MIB, DurationMs, PositiveBytes, PositiveMs, Section, SizeBytes, TopicPattern
from tiers.config.total_retention import (
    MAX_MINUTES,
    NO_TOTAL,
    NOTHING_EXPIRES,
    RETENTION_BYTES,
    RETENTION_MINUTES,
    UNLIMITED,
    Retention,
    TotalRetention,
    longest_total,
    recorded_total,
)
from tiers.model.ids import TopicIdPartition

NOTHING_TIERED: Final = "nothing, because there is no [storage], or remote.log.storage.system.enable is false"
NOT_NAMED: Final = "no setting tiers it"
_SHOWN_TOPICS = 5
BROKER_KEYS = ("cleanup.policy", "retention.ms", "retention.bytes", "remote.storage.enable")


NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
COPY_LAG_MS, COPY_LAG_BYTES = "remote.copy.lag.ms", "remote.copy.lag.bytes"
AS_LOCAL_RETENTION = -1
"""The value of `remote.copy.lag.*` that stands for the local retention."""
SAME_AS_TOTAL = -2
"""The value of `local.retention.*` for a topic to which only the broker's own retention applies."""
_LEAST_NUMBERS = {
    "local.retention.ms": SAME_AS_TOTAL,
    "local.retention.bytes": SAME_AS_TOTAL,
    RETENTION_MINUTES: UNLIMITED,
    RETENTION_BYTES: UNLIMITED,
    COPY_LAG_MS: AS_LOCAL_RETENTION,
    COPY_LAG_BYTES: AS_LOCAL_RETENTION,
}
"""The tier settings of a topic that are numbers, each with its least value."""


class TierWork(StrEnum):
    """The work on a topic's remote tier that an operator can pause (docs/day-to-day.md, "Pause a topic").

    The settings that pause it are part of the topic's own tier settings, so every proxy sees them, and they survive
    restarts. The file has no such keys: a pause belongs to the cluster, and not to the process whose file says so."""

    COPYING = "copying"
    TRIMMING = "trimming"
    EXPIRING = "expiring"
    READING = "reading"

    @property
    def key(self) -> str:
        """The tier setting that pauses this work."""
        return f"remote.log.{self.value}.paused"


NOTHING_PAUSED: Final[frozenset[TierWork]] = frozenset()
PAUSE_KEYS: Final = tuple(work.key for work in TierWork)
READING_PAUSED: Final = TierWork.READING.key


def paused_work(config: Mapping[str, str]) -> frozenset[TierWork]:
    """Returns the paused work by a topic's own tier settings."""
    if not config:
        return NOTHING_PAUSED
    return frozenset(work for work in TierWork if config.get(work.key) == "true")


def holding_back(configs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Returns the settings that hold back deletions: the longest total retention and all pauses of several settings.

    Which of them is the last one is not known. A pause too many costs nothing, and an operator ends it."""
    several = list(configs)
    pauses = {work.key: "true" for each in several for work in paused_work(each)}
    return pauses | longest_total(list(map(recorded_total, several))).config()


def resume_command(topic: str, work: Iterable[TierWork]) -> str:
    """Returns the command that ends the pause of this work."""
    return f"tidegate tier resume {topic} {' '.join(f'--{each.value}' for each in sorted(work))} --yes"


class TopicConfig(Section):
    """The tiered topics. There may be any number of `[[topics]]`; the first that matches a topic decides."""

    pattern: TopicPattern = Field(
        validation_alias=AliasChoices("name", "pattern"),
        description="The topic's name, or a shell pattern such as `orders-*`, for which the key may be `pattern`.",
    )
    remote_storage_enable: bool = Field(default=True, description="Whether to tier the topic.")
    local_retention_ms: DurationMs = Field(
        default=SAME_AS_TOTAL,
        ge=SAME_AS_TOTAL,
        description="How long the broker keeps copied records. -2 stands for retention.ms.",
    )
    local_retention_bytes: SizeBytes = Field(
        default=SAME_AS_TOTAL,
        ge=SAME_AS_TOTAL,
        description="How many bytes of copied records the broker keeps per partition. -2 stands for retention.bytes.",
    )
    total_retention_minutes: int | None = Field(
        default=None,
        validation_alias=RETENTION_MINUTES,
        ge=UNLIMITED,
        le=MAX_MINUTES,
        description=(
            "The total retention over both tiers, in minutes, if it is not the broker's retention.ms. -1 is unlimited. "
            "The owner records it for a topic without a recorded total, if it is not shorter than the broker's "
            "retention. Any other change needs `kafka-configs` through the proxy: see 'Two retentions' in "
            "docs/day-to-day.md."
        ),
    )
    total_retention_bytes: SizeBytes | None = Field(
        default=None,
        validation_alias=RETENTION_BYTES,
        ge=UNLIMITED,
        lt=1 << 63,
        description=(
            "The total retention over both tiers, in bytes per partition, if it is not the broker's retention.bytes. "
            "-1 is unlimited. The same rules apply. If only one of the two keys is set, the other is unlimited."
        ),
    )
    segment_bytes: PositiveBytes = Field(
        default=256 * MIB,
        lt=1 << 31,
        description="The size of a remote segment.",
    )
    segment_ms: PositiveMs = Field(
        default=3_600_000,
        description="The age at which records are copied even if they do not fill a segment.",
    )
    copy_lag_ms: DurationMs = Field(
        default=0,
        validation_alias=COPY_LAG_MS,
        ge=AS_LOCAL_RETENTION,
        description=(
            "Delays copies until the oldest record is that old (KIP-1241). -1 stands for the local retention, 0 for no "
            "delay. Records are copied before they have used 40 % of a broker's retention that is not the total."
        ),
    )
    copy_lag_bytes: SizeBytes = Field(
        default=AS_LOCAL_RETENTION,
        validation_alias=COPY_LAG_BYTES,
        ge=AS_LOCAL_RETENTION,
        lt=1 << 63,
        description=(
            "Delays copies until so many bytes lie behind the segment. If both lags are set, one of them is enough. -1 "
            "stands for the local retention, 0 for no delay."
        ),
    )
    fetch_max_bytes_per_second: PositiveBytes | None = Field(
        default=None,
        validation_alias="remote.fetch.max.bytes.per.second",
        description=("The quota for all reads of clients from the remote tier of each such topic."),
    )
    copy_disable: bool = Field(
        default=False,
        validation_alias="remote.log.copy.disable",
        description="Stops copying; copied records stay readable (KIP-950).",
    )

    @model_validator(mode="after")
    def _check_local_retention(self) -> TopicConfig:
        local = Retention(max(UNLIMITED, self.local_retention_ms), max(UNLIMITED, self.local_retention_bytes))
        total = self.total_retention.over(NOTHING_EXPIRES)
        if UNLIMITED < total.ms < local.ms:
            raise ValueError(f"local.retention.ms is longer than {RETENTION_MINUTES}")
        if UNLIMITED < total.size_bytes < local.size_bytes:
            raise ValueError(f"local.retention.bytes is more than {RETENTION_BYTES}")
        if UNLIMITED < local.ms < self.copy_lag_ms:
            raise ValueError(f"{COPY_LAG_MS} is longer than local.retention.ms")
        if UNLIMITED < local.size_bytes < self.copy_lag_bytes:
            raise ValueError(f"{COPY_LAG_BYTES} is more than local.retention.bytes")
        return self

    @property
    def total_retention(self) -> TotalRetention:
        """The total of the file. It counts only when it is recorded."""
        return TotalRetention(self.total_retention_minutes, self.total_retention_bytes)

    def matches(self, topic: str) -> bool:
        return fnmatchcase(topic, self.pattern)


RULE_FIELDS: Final[Mapping[str, str]] = {
    key_of(name, field): name
    for name, field in TopicConfig.model_fields.items()
    if name in ("remote_storage_enable", "copy_disable") or name.startswith(("local_retention_", "copy_lag_"))
}
"""The fields of a rule that the topic's own tier settings override, by their keys."""
Rules = Callable[[], Sequence[TopicConfig]]
"""Returns the rules of the file that are in effect. A reload may replace them at any time."""


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """A topic's policy. A retention of -1 is unlimited.

    `retention_ms` and `retention_bytes` are the total over both tiers. Both are -1 while nothing of the topic may
    expire. A local retention is None if Tidegate trims nothing for it."""

    topic: str
    topic_id: UUID
    partition_count: int
    retention_ms: int
    retention_bytes: int
    local_retention_ms: int | None
    local_retention_bytes: int | None
    segment_bytes: int
    segment_ms: int
    copy_disable: bool = False
    copy_lag_ms: int = 0
    """How old a record is before it is copied. -1: no age is enough. 0: nothing is delayed, whatever the bytes are."""
    copy_lag_bytes: int = UNLIMITED
    """How many bytes lie behind a segment before it is copied, if its records are younger. -1: none are enough."""
    broker_retention: Retention | None = None
    """The broker's own retention, if it is known. It bounds the local tier, whatever the total is."""
    recorded_total: TotalRetention = NO_TOTAL
    """The recorded total that this policy was made of."""
    tier_settings: Mapping[str, str] = field(default_factory=dict)
    """The topic's own tier settings that this policy was made of."""
    total_to_record: TotalRetention | None = None
    """The total of the file, if it may be recorded as it is. Until then nothing expires."""
    total_conflict: str = ""
    """The reason why the total of the file must not be recorded. While there is one, nothing expires."""
    paused: frozenset[TierWork] = NOTHING_PAUSED
    """The work on the topic that an operator paused."""
    is_doubtful: bool = False
    """Whether the present retention may be another one, because the brokers did not tell it. Then nothing expires."""

    def partitions(self) -> list[TopicIdPartition]:
        return [TopicIdPartition(self.topic_id, index, self.topic) for index in range(self.partition_count)]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a topic that a rule names cannot be tiered."""

    topic: str
    reason: str


def is_internal(topic: str) -> bool:
    """Whether the name is that of an internal topic, which no setting of any proxy can tier."""
    return topic.startswith("__")


def managed_rule(topic: str, rules: Sequence[TopicConfig], overrides: Mapping[str, str] | None) -> TopicConfig | None:
    """Returns the rule by which an owner manages the topic, if the topic's configuration agrees (`policy_of`).

    None: no owner manages it. An override that cannot be read changes nothing."""
    if is_internal(topic):
        return None
    rule = next((rule for rule in rules if rule.matches(topic)), None)
    if overrides:
        rule = _overridden(rule or TopicConfig(pattern=topic, remote_storage_enable=False), overrides)
    return rule if rule is not None and rule.remote_storage_enable else None


def exclusion(topic: str, rules: Sequence[TopicConfig], overrides: Mapping[str, str]) -> str | None:
    """Returns which setting keeps a topic from being tiered that the settings name. None: nothing does, or nothing
    names it."""
    rule = next((rule for rule in rules if rule.matches(topic)), None)
    if is_internal(topic) or (rule is None and "remote.storage.enable" not in overrides):
        return None
    if managed_rule(topic, rules, overrides) is not None:
        return None
    if "remote.storage.enable" in overrides:
        return "the topic's own remote.storage.enable is false"
    return f"the file excludes it: [[topics]] {'' if rule is None else rule.pattern} has remote.storage.enable = false"


def _overridden(rule: TopicConfig, overrides: Mapping[str, str]) -> TopicConfig:
    update: dict[str, object] = {}
    for key, name in RULE_FIELDS.items():
        if key in _LEAST_NUMBERS:
            update[name] = _number(overrides, key, getattr(rule, name))
        elif key in overrides:
            update[name] = overrides[key].lower() == "true"
    return rule.model_copy(update=update)


def unreadable_setting(tier_settings: Mapping[str, str]) -> str | None:
    """Returns which of a topic's own tier settings cannot be read. None: all can be."""
    for key, least in _LEAST_NUMBERS.items():
        if key in tier_settings and _number(tier_settings, key, least - 1) < least:
            return f"its tier setting {key} cannot be read: {tier_settings[key]!r}"
    return None


def _number(values: Mapping[str, str], key: str, default: int) -> int:
    with suppress(KeyError, ValueError):
        return int(values[key])
    return default


def policy_of(
    topic: str,
    topic_id: UUID,
    partition_count: int,
    rule: TopicConfig,
    config: Mapping[str, str],
    tier_settings: Mapping[str, str] = NO_SETTINGS,
) -> TopicPolicy | Refusal:
    """Returns the topic's policy, or why it cannot be tiered. `config` has the broker's values of `BROKER_KEYS`.

    `tier_settings` are the topic's own, which may have a recorded total retention. The file alone shortens nothing: if
    its total differs from the recorded one, nothing expires. The file's total may be recorded only if no total is
    recorded, and the broker's retention, which is the total then, is not longer."""
    if (unreadable := unreadable_setting(tier_settings)) is not None:
        return Refusal(topic, unreadable)
    recorded = recorded_total(tier_settings)
    cleanup = config.get("cleanup.policy", "")
    if cleanup != "delete":
        return Refusal(topic, f"cleanup.policy is {cleanup!r}; only 'delete' can be tiered")
    if config.get("remote.storage.enable", "false").lower() == "true":
        return Refusal(topic, "the brokers tier it themselves (remote.storage.enable=true)")
    try:
        retention_ms, retention_bytes = int(config["retention.ms"]), int(config["retention.bytes"])
    except (KeyError, ValueError):
        return Refusal(topic, "the broker does not report its retention")
    broker = Retention(retention_ms, retention_bytes)
    said, to_record, conflict = rule.total_retention, None, ""
    total = recorded.over(broker)
    if said.contradicts(recorded):
        if recorded.is_set:
            conflict = f"the file has {said}, and {recorded} is recorded"
        elif said.over(broker).is_shorter_than(broker):
            conflict = f"the file has {said}, and the broker keeps {broker}, which was the total until now"
        else:
            to_record = said
        total = NOTHING_EXPIRES
    return TopicPolicy(
        topic=topic,
        topic_id=topic_id,
        partition_count=partition_count,
        retention_ms=total.ms,
        retention_bytes=total.size_bytes,
        local_retention_ms=_local(rule.local_retention_ms),
        local_retention_bytes=_local(rule.local_retention_bytes),
        segment_bytes=rule.segment_bytes,
        segment_ms=rule.segment_ms,
        copy_disable=rule.copy_disable,
        # While the total is not known, the brokers may remove records that are not copied.
        copy_lag_ms=0 if said.contradicts(recorded) else _lag(rule.copy_lag_ms, rule.local_retention_ms, total.ms),
        copy_lag_bytes=_lag(rule.copy_lag_bytes, rule.local_retention_bytes, total.size_bytes),
        broker_retention=broker,
        recorded_total=recorded,
        tier_settings=dict(tier_settings),
        total_to_record=to_record,
        total_conflict=conflict,
        paused=paused_work(tier_settings),
    )


def _lag(lag: int, local: int, total: int) -> int:
    """Returns the lag in effect. -1: it is unlimited, as the local retention is."""
    if lag != AS_LOCAL_RETENTION:
        return lag
    return total if local == SAME_AS_TOTAL else local


def _local(value: int) -> int | None:
    return None if value in (SAME_AS_TOTAL, UNLIMITED) else value


def few(topics: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f", and {len(topics) - _SHOWN_TOPICS} more" if len(topics) > _SHOWN_TOPICS else ""
    return f"{', '.join(topics[:_SHOWN_TOPICS])}{more}" if topics else "no topic"


def tiering_text(rules: Sequence[TopicConfig], topics: Iterable[tuple[str, TopicConfig]]) -> str:
    """`topics` are the tiered ones, each with its rule (`managed_rule`).

    The rule is none of the file if the topic's own configuration tiers it."""
    by_rule: dict[str, list[str]] = {rule.pattern: [] for rule in rules if rule.remote_storage_enable}
    own: list[str] = []
    for topic, rule in sorted(topics, key=lambda each: each[0]):
        by_rule.get(rule.pattern, own).append(topic)
    if not by_rule:
        return f"only by kafka-configs: {few(own)}"
    said = [f"by [[topics]] {pattern}: {few(found)}" for pattern, found in by_rule.items()]
    return "; ".join([*said, *([f"by kafka-configs: {few(own)}"] if own else [])])


def tiering_of(rules: Sequence[TopicConfig], topics: Iterable[str]) -> str:
    """Does the same for topics whose own configuration is not known."""
    found = ((topic, managed_rule(topic, rules, None)) for topic in topics)
    return tiering_text(rules, [(topic, rule) for topic, rule in found if rule is not None])
