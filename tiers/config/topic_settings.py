"""The tier settings that Kafka's own APIs can set for a topic: their types, values and rules (docs/semantics.md 9.4).

Rules, codes and texts are Kafka's (LogConfig.validate), with one exception: tiering needs no switch on the brokers. A
topic's own settings override those of the settings file, key by key. A request is never refused because of the file:
local retention beyond the total one simply has no effect.

The total retention (`remote.log.retention.*`) is no setting of Kafka. A request may set a shorter one, since it names
the number. A request that only removes the keys must not shorten the total.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.errors import ErrorCode
from tiers.config.settings import text_of
from tiers.config.topic_policy import (
    AS_LOCAL_RETENTION,
    COPY_LAG_BYTES,
    COPY_LAG_MS,
    PAUSE_KEYS,
    RULE_FIELDS,
    SAME_AS_TOTAL,
    TopicConfig,
)
from tiers.config.total_retention import (
    MAX_MINUTES,
    MS_PER_MINUTE,
    REPLACED_KEYS,
    RETENTION_BYTES,
    RETENTION_MINUTES,
    TOTAL_KEYS,
    UNLIMITED,
    Retention,
    TotalRetention,
    recorded_total,
)
from tiers.texts import duration_text, size_text

REMOTE_STORAGE_ENABLE = "remote.storage.enable"
LOCAL_RETENTION_MS, LOCAL_RETENTION_BYTES = "local.retention.ms", "local.retention.bytes"
COPY_DISABLE = "remote.log.copy.disable"
DELETE_ON_DISABLE = "remote.log.delete.on.disable"
SAME_AS_BROKERS = -2
"""The default of the total retention: it is the broker's. A request that sets it removes the key."""

TIER_DEFAULTS: Mapping[str, str] = {
    REMOTE_STORAGE_ENABLE: "false",
    LOCAL_RETENTION_MS: str(SAME_AS_TOTAL),
    LOCAL_RETENTION_BYTES: str(SAME_AS_TOTAL),
    COPY_DISABLE: "false",
    COPY_LAG_MS: "0",
    COPY_LAG_BYTES: str(AS_LOCAL_RETENTION),
    DELETE_ON_DISABLE: "false",
    RETENTION_MINUTES: str(SAME_AS_BROKERS),
    RETENTION_BYTES: str(SAME_AS_BROKERS),
    **dict.fromkeys(PAUSE_KEYS, "false"),
}
"""Every tier setting of a topic, with its default."""

BROKER_DEFAULTS: Mapping[str, str] = {"cleanup.policy": "delete", "retention.ms": "604800000", "retention.bytes": "-1"}
"""The broker's settings that the rules check as well, with Kafka's defaults."""

_LONG = re.compile(r"[+-]?[0-9]+")
_MAX_LONG = (1 << 63) - 1


class InvalidTierConfigError(Exception):
    """A setting that is refused. `code` and the text are those that Kafka answers."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_CONFIG) -> None:
        super().__init__(message)
        self.code = code


def value_text(key: str, text: str) -> str:
    """Returns the value of a topic's setting as a person reads it."""
    if not _LONG.fullmatch(text):
        return text
    value = int(text)
    match key.rpartition(".")[2], value:
        case _, -1:
            return "as the local retention" if key in (COPY_LAG_MS, COPY_LAG_BYTES) else "unlimited"
        case _, -2:
            return "as the broker" if key in TOTAL_KEYS else "as the total"
        case "minutes", _:
            return duration_text(value * MS_PER_MINUTE)
        case "ms", _:
            return duration_text(value)
        case "bytes", _:
            return size_text(value)
    return text


def is_boolean(key: str) -> bool:
    return TIER_DEFAULTS[key] in ("true", "false")


def checked_value(key: str, value: str) -> str:
    """Returns the value in the form in which it is stored. Raises `InvalidTierConfigError`."""
    text = value.strip()
    if is_boolean(key):
        if text.lower() not in ("true", "false"):
            raise _invalid(key, value, "Expected value to be either true or false")
        return text.lower()
    if not _LONG.fullmatch(text) or not -_MAX_LONG - 1 <= int(text) <= _MAX_LONG:
        raise _invalid(key, value, "Not a number of type LONG")
    least = AS_LOCAL_RETENTION if key in (COPY_LAG_MS, COPY_LAG_BYTES) else SAME_AS_TOTAL
    if int(text) < least:
        raise _invalid(key, value, f"Value must be at least {least}")
    if key == RETENTION_MINUTES and int(text) > MAX_MINUTES:
        raise _invalid(key, value, f"Value must be no more than {MAX_MINUTES}")
    return str(int(text))


def removes(key: str, value: str) -> bool:
    """Returns whether a request that sets the key to this checked value removes the key."""
    return key in TOTAL_KEYS and int(value) == SAME_AS_BROKERS


def check_name(key: str) -> None:
    """Refuses a key that does not exist and has a replacement. Raises `InvalidTierConfigError`."""
    if key in REPLACED_KEYS:
        raise InvalidTierConfigError(f"Unknown topic config name: {key}. Use {REPLACED_KEYS[key]} instead.")


def _invalid(key: str, value: object, message: str) -> InvalidTierConfigError:
    return InvalidTierConfigError(f"Invalid value {value} for configuration {key}: {message}")


@dataclass(frozen=True, slots=True)
class TierValue:
    """The value of a setting, and its source.

    `is_own`: the topic has its own value. `is_from_file`: a rule of the settings file sets it. Else it is the
    default."""

    value: str
    is_own: bool = False
    is_from_file: bool = False


def tier_values(rule: TopicConfig | None, own: Mapping[str, str]) -> dict[str, TierValue]:
    """Returns the settings of a topic, by key. `rule` is the first rule of the settings file that matches the topic."""
    values = {key: TierValue(default) for key, default in TIER_DEFAULTS.items()}
    if rule is not None:
        said = {key: text_of(getattr(rule, name)) for key, name in RULE_FIELDS.items()}
        values |= {
            key: TierValue(value, is_from_file=True) for key, value in said.items() if value != TIER_DEFAULTS[key]
        }
    return values | {key: TierValue(value, is_own=True) for key, value in own.items() if key in TIER_DEFAULTS}


def is_enabled(rule: TopicConfig | None, own: Mapping[str, str]) -> bool:
    return tier_values(rule, own)[REMOTE_STORAGE_ENABLE].value == "true"


def is_deletion_requested(own: Mapping[str, str]) -> bool:
    """Whether a topic's own settings request the deletion of its remote log (KIP-950). Both keys must be recorded.

    A topic that is only missing in the settings file stays."""
    return own.get(REMOTE_STORAGE_ENABLE) == "false" and own.get(DELETE_ON_DISABLE) == "true"


def check_tier_config(
    rule: TopicConfig | None, before: Mapping[str, str], after: Mapping[str, str], broker: Mapping[str, str]
) -> None:
    """Checks the change of a topic's own settings from `before` to `after`. Raises `InvalidTierConfigError`.

    `broker` has the values that the topic will have for the keys of `BROKER_DEFAULTS`."""
    retention, is_tiered = _brokers_retention(broker), is_enabled(rule, after)
    deletes_remote_log = not is_tiered and after.get(DELETE_ON_DISABLE) == "true"
    if retention is not None and not deletes_remote_log:
        _check_removal(before, after, retention)
    if not is_tiered:
        if is_enabled(rule, before) and not deletes_remote_log:
            raise InvalidTierConfigError(
                "It is invalid to disable remote storage without deleting remote data. "
                "If you want to keep the remote data and turn to read only, please set "
                "`remote.storage.enable=true,remote.log.copy.disable=true`. "
                "If you want to disable remote storage and delete all remote data, please set "
                "`remote.storage.enable=false,remote.log.delete.on.disable=true`."
            )
        return
    policies = {policy.strip().lower() for policy in broker["cleanup.policy"].split(",")}
    if policies != {"delete"}:
        raise InvalidTierConfigError("Remote log storage only supports topics with cleanup.policy=delete")
    if retention is None:
        return  # the broker refuses the request itself
    own = _own_total(after)
    total = own.over(retention)
    keys = TOTAL_KEYS if own.is_set else ("retention.ms", "retention.bytes")
    _check_local_retention(LOCAL_RETENTION_BYTES, keys[1], total.size_bytes, after)
    _check_local_retention(LOCAL_RETENTION_MS, keys[0], total.ms, after)
    _check_lag(COPY_LAG_BYTES, LOCAL_RETENTION_BYTES, total.size_bytes, after)
    _check_lag(COPY_LAG_MS, LOCAL_RETENTION_MS, total.ms, after)
    if own.is_set and after.get(COPY_DISABLE) == "true" and retention.is_shorter_than(total):
        raise InvalidTierConfigError(
            f"When `{COPY_DISABLE}` is set to true, `retention.ms` and `retention.bytes` must not be shorter than "
            f"`{RETENTION_MINUTES}` and `{RETENTION_BYTES}`, because new records stay on the brokers, which remove "
            "them by their own retention."
        )


def _brokers_retention(broker: Mapping[str, str]) -> Retention | None:
    try:
        return Retention(int(broker["retention.ms"]), int(broker["retention.bytes"]))
    except ValueError:
        return None


def _own_total(config: Mapping[str, str]) -> TotalRetention:
    try:
        return recorded_total(config)
    except ValueError as error:
        raise InvalidTierConfigError(str(error)) from error


def _check_removal(before: Mapping[str, str], after: Mapping[str, str], broker: Retention) -> None:
    """Refuses to remove the total retention if the broker's, which would be the total then, is shorter.

    Such a request would expire records, but has no number that says so."""
    known = _own_total(before)
    if known.is_set and not _own_total(after).is_set and broker.is_shorter_than(known.over(broker)):
        raise InvalidTierConfigError(
            f"It is invalid to remove `{RETENTION_MINUTES}` and `{RETENTION_BYTES}` while the broker's retention "
            f"({broker}) is shorter than the total ({known.over(broker)}), because records would expire. Raise "
            f"`retention.ms` and `retention.bytes` first, or set `{RETENTION_MINUTES}` and `{RETENTION_BYTES}` to the "
            "shorter retention."
        )


def _check_lag(lag_key: str, local_key: str, total: int, after: Mapping[str, str]) -> None:
    """Refuses a lag beyond the local retention (KIP-1241)."""
    lag, local = int(after.get(lag_key, 0)), int(after.get(local_key, SAME_AS_TOTAL))
    local = total if local == SAME_AS_TOTAL else local
    if UNLIMITED < local < lag:
        raise _invalid(lag_key, lag, f"Value must not be more than {local_key} property value: {local}")


def _check_local_retention(local_key: str, total_key: str, total: int, after: Mapping[str, str]) -> None:
    """`total` is in the unit of the local key."""
    local = int(after.get(local_key, SAME_AS_TOTAL))
    if local == SAME_AS_TOTAL:
        return
    shown = total // MS_PER_MINUTE if total_key == RETENTION_MINUTES and total > UNLIMITED else total
    if total > UNLIMITED:
        if local == UNLIMITED:
            raise _invalid(local_key, local, f"Value must not be -1 as {total_key} value is set as {shown}.")
        if local > total:
            raise _invalid(local_key, local, f"Value must not be more than {total_key} property value: {shown}")
    if after.get(COPY_DISABLE) == "true" and local != total:
        raise InvalidTierConfigError(
            f"When `remote.log.copy.disable` is set to true, the `{local_key}` and `{total_key}` must be set to the "
            "identical value because there will be no more logs copied to the remote storage."
        )
