"""Kafka's rules for the tier settings of a topic, in Kafka's words (LogConfig of 4.1)."""

from __future__ import annotations

from uuid import UUID

import pytest

from tiers.config.topic_policy import (
    COPY_LAG_BYTES,
    COPY_LAG_MS,
    TopicConfig,
    TopicPolicy,
    managed_rule,
    policy_of,
)
from tiers.config.topic_settings import (
    BROKER_DEFAULTS,
    COPY_DISABLE,
    DELETE_ON_DISABLE,
    LOCAL_RETENTION_BYTES,
    LOCAL_RETENTION_MS,
    REMOTE_STORAGE_ENABLE,
    TIER_DEFAULTS,
    InvalidTierConfigError,
    TierValue,
    check_tier_config,
    checked_value,
    removes,
    tier_values,
)
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES

ON = {REMOTE_STORAGE_ENABLE: "true"}


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        (REMOTE_STORAGE_ENABLE, "True", "true"),
        (COPY_DISABLE, " false ", "false"),
        (LOCAL_RETENTION_MS, "-2", "-2"),
        (LOCAL_RETENTION_MS, "+10", "10"),
        (LOCAL_RETENTION_BYTES, str((1 << 63) - 1), str((1 << 63) - 1)),
        (RETENTION_MINUTES, " 129600", "129600"),
        (RETENTION_BYTES, "-1", "-1"),
    ],
)
def test_values_are_kept_as_kafka_reads_them(key: str, value: str, kept: str) -> None:
    assert checked_value(key, value) == kept


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (REMOTE_STORAGE_ENABLE, "yes", "Expected value to be either true or false"),
        (LOCAL_RETENTION_MS, "1d", "Not a number of type LONG"),
        (LOCAL_RETENTION_MS, "1_000", "Not a number of type LONG"),
        (LOCAL_RETENTION_MS, "", "Not a number of type LONG"),
        (LOCAL_RETENTION_BYTES, str(1 << 63), "Not a number of type LONG"),
        (LOCAL_RETENTION_BYTES, "-3", "Value must be at least -2"),
        (RETENTION_MINUTES, "90d", "Not a number of type LONG"),
        (RETENTION_MINUTES, str((1 << 63) - 1), "Value must be no more than 153722867280912"),
        (RETENTION_BYTES, "-3", "Value must be at least -2"),
        (COPY_LAG_MS, "-2", "Value must be at least -1"),
        (COPY_LAG_BYTES, "1d", "Not a number of type LONG"),
    ],
)
def test_values_of_the_wrong_type_are_refused(key: str, value: str, reason: str) -> None:
    with pytest.raises(InvalidTierConfigError) as refused:
        checked_value(key, value)
    assert str(refused.value) == f"Invalid value {value} for configuration {key}: {reason}"
    assert refused.value.code == 40


@pytest.mark.parametrize(
    ("after", "broker"),
    [
        (ON, {}),
        (ON | {LOCAL_RETENTION_MS: "1000"}, {"retention.ms": "1000"}),
        (ON | {LOCAL_RETENTION_MS: "-1"}, {"retention.ms": "-1"}),
        (ON | {LOCAL_RETENTION_BYTES: "5"}, {}),
        (ON | {COPY_LAG_MS: "1000"}, {"retention.ms": "1000"}),
        (ON | {COPY_LAG_MS: "-1", COPY_LAG_BYTES: "0", LOCAL_RETENTION_BYTES: "5"}, {}),
        (ON | {COPY_DISABLE: "true"}, {"retention.ms": "1000"}),
        (ON | {COPY_DISABLE: "true", LOCAL_RETENTION_MS: "1000"}, {"retention.ms": "1000"}),
        ({LOCAL_RETENTION_MS: "5000"}, {"retention.ms": "1000", "cleanup.policy": "compact"}),
        (ON | {RETENTION_MINUTES: "1", LOCAL_RETENTION_MS: "60000"}, {"retention.ms": "1000"}),
        (ON | {RETENTION_MINUTES: "1", LOCAL_RETENTION_BYTES: "9"}, {"retention.bytes": "5"}),
        (ON | {RETENTION_MINUTES: "1", COPY_DISABLE: "true"}, {"retention.ms": "60000"}),
    ],
)
def test_settings_that_kafka_accepts_are_accepted(after: dict[str, str], broker: dict[str, str]) -> None:
    check_tier_config(None, {}, after, {**BROKER_DEFAULTS, **broker})


@pytest.mark.parametrize(
    ("after", "broker", "reason"),
    [
        (ON, {"cleanup.policy": "compact"}, "only supports topics with cleanup.policy=delete"),
        (ON, {"cleanup.policy": "delete,compact"}, "only supports topics with cleanup.policy=delete"),
        (
            ON | {LOCAL_RETENTION_MS: "1001"},
            {"retention.ms": "1000"},
            "not be more than retention.ms property value: 1000",
        ),
        (ON | {LOCAL_RETENTION_MS: "-1"}, {"retention.ms": "9"}, "not be -1 as retention.ms value is set as 9."),
        (ON | {LOCAL_RETENTION_BYTES: "4"}, {"retention.bytes": "3"}, "more than retention.bytes property value: 3"),
        (ON | {COPY_DISABLE: "true", LOCAL_RETENTION_BYTES: "5"}, {}, "must be set to the identical value"),
        (
            ON | {RETENTION_MINUTES: "1", LOCAL_RETENTION_MS: "60001"},
            {"retention.ms": "90000"},
            "not be more than remote.log.retention.minutes property value: 1",
        ),
        (
            ON | {RETENTION_BYTES: "4", LOCAL_RETENTION_BYTES: "-1"},
            {},
            "not be -1 as remote.log.retention.bytes value is set as 4.",
        ),
        (ON | {COPY_LAG_MS: "1001"}, {"retention.ms": "1000"}, "more than local.retention.ms property value: 1000"),
        (ON | {COPY_LAG_BYTES: "6", LOCAL_RETENTION_BYTES: "5"}, {}, "local.retention.bytes property value: 5"),
        (ON | {RETENTION_MINUTES: "2", COPY_DISABLE: "true"}, {"retention.ms": "60000"}, "must not be shorter than"),
    ],
)
def test_settings_that_kafka_refuses_are_refused(after: dict[str, str], broker: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidTierConfigError, match=reason):
        check_tier_config(None, {}, after, {**BROKER_DEFAULTS, **broker})


SHORTER = {"retention.ms": "60000", "retention.bytes": "100"}


@pytest.mark.parametrize(
    ("before", "broker"),
    [
        ({RETENTION_MINUTES: "2"}, SHORTER | {"retention.bytes": "-1"}),
        ({RETENTION_MINUTES: "1"}, SHORTER),  # whose bytes are unlimited
        ({RETENTION_BYTES: "101"}, SHORTER | {"retention.ms": "-1"}),
        ({RETENTION_MINUTES: "-1", RETENTION_BYTES: "-1"}, SHORTER),
    ],
)
@pytest.mark.parametrize("tiered", [ON, {}, ON | {DELETE_ON_DISABLE: "true"}])
def test_a_total_is_not_removed_while_the_brokers_is_shorter(
    before: dict[str, str], broker: dict[str, str], tiered: dict[str, str]
) -> None:
    with pytest.raises(InvalidTierConfigError, match=r"invalid to remove `remote.log.retention.minutes`"):
        check_tier_config(None, tiered | before, tiered, {**BROKER_DEFAULTS, **broker})
    check_tier_config(None, ON | before, {DELETE_ON_DISABLE: "true"}, {**BROKER_DEFAULTS, **broker})


def test_a_total_may_be_removed_or_shortened_by_number() -> None:
    broker = {**BROKER_DEFAULTS, **SHORTER}
    check_tier_config(None, ON | {RETENTION_MINUTES: "1", RETENTION_BYTES: "100"}, ON, broker)
    check_tier_config(None, ON | {RETENTION_MINUTES: "9"}, ON | {RETENTION_MINUTES: "0"}, broker)
    check_tier_config(None, ON, ON | {RETENTION_MINUTES: "0"}, broker)


def test_only_the_default_of_a_total_removes_it() -> None:
    assert removes(RETENTION_MINUTES, "-2")
    assert not removes(RETENTION_MINUTES, "-1")
    assert not removes(LOCAL_RETENTION_MS, "-2")


def test_the_total_of_a_file_is_not_shown_as_the_topics() -> None:
    values = tier_values(TopicConfig(pattern="orders", total_retention_minutes=5), {})
    assert values[RETENTION_MINUTES] == TierValue("-2")


@pytest.mark.parametrize("rule", [None, TopicConfig(pattern="orders")])
@pytest.mark.parametrize(
    "after", [{REMOTE_STORAGE_ENABLE: "false"}, {REMOTE_STORAGE_ENABLE: "false", DELETE_ON_DISABLE: "false"}]
)
def test_remote_data_is_disabled_only_to_be_deleted(rule: TopicConfig | None, after: dict[str, str]) -> None:
    before = ON if rule is None else {}
    with pytest.raises(InvalidTierConfigError, match="invalid to disable remote storage without deleting"):
        check_tier_config(rule, before, after, BROKER_DEFAULTS)
    check_tier_config(rule, before, after | {DELETE_ON_DISABLE: "true"}, BROKER_DEFAULTS)
    check_tier_config(rule, after, after, BROKER_DEFAULTS)


def test_a_topics_own_settings_win_over_the_settings_file_key_by_key() -> None:
    rule = TopicConfig(pattern="orders", local_retention_ms=6000, local_retention_bytes=7)
    values = tier_values(rule, {LOCAL_RETENTION_MS: "5", "max.message.bytes": "1"})
    assert values.keys() == TIER_DEFAULTS.keys()
    assert values[LOCAL_RETENTION_MS] == TierValue("5", is_own=True)
    assert values[LOCAL_RETENTION_BYTES] == TierValue("7", is_from_file=True)
    assert values[REMOTE_STORAGE_ENABLE] == TierValue("true", is_from_file=True)
    assert values[COPY_DISABLE] == TierValue("false")
    assert tier_values(None, {}) == {key: TierValue(value) for key, value in TIER_DEFAULTS.items()}


def test_local_retention_of_the_file_does_not_block_a_change() -> None:
    rule = TopicConfig(pattern="*", local_retention_ms=6000)
    check_tier_config(rule, {}, {}, {**BROKER_DEFAULTS, "retention.ms": "1000"})


@pytest.mark.parametrize(
    ("own", "in_effect"),
    [
        ({}, (0, 5_000)),
        ({COPY_LAG_MS: "7", COPY_LAG_BYTES: "9"}, (7, 9)),
        ({COPY_LAG_MS: "-1", LOCAL_RETENTION_MS: "50", LOCAL_RETENTION_BYTES: "60"}, (50, 60)),
        ({COPY_LAG_MS: "-1"}, (60_000, 5_000)),
        ({COPY_LAG_MS: "-1", LOCAL_RETENTION_MS: "-1", LOCAL_RETENTION_BYTES: "-1"}, (-1, -1)),
        ({COPY_LAG_MS: "-1", RETENTION_BYTES: "8000"}, (-1, 8_000)),
    ],
)
def test_a_lag_of_minus_one_is_the_local_retention(own: dict[str, str], in_effect: tuple[int, int]) -> None:
    broker = {"cleanup.policy": "delete", "retention.ms": "60000", "retention.bytes": "5000"}
    rule = managed_rule("orders", [], ON | own)
    assert rule is not None
    made = policy_of("orders", UUID(int=1), 1, rule, broker, own)
    assert isinstance(made, TopicPolicy)
    assert (made.copy_lag_ms, made.copy_lag_bytes) == in_effect


def test_nothing_is_delayed_while_the_total_is_not_known() -> None:
    rule = TopicConfig(pattern="orders", copy_lag_ms=9_000, total_retention_minutes=5)
    broker = {"cleanup.policy": "delete", "retention.ms": "60000", "retention.bytes": "-1"}
    made = policy_of("orders", UUID(int=1), 1, rule, broker)
    assert isinstance(made, TopicPolicy)
    assert made.copy_lag_ms == 0
