"""The tier settings that Kafka's own APIs can set for a topic: their types, values and rules (docs/semantics.md 9.4).

Rules, codes and texts are Kafka's (LogConfig.validate), with one exception: tiering needs no switch on the brokers. A
topic's own settings override those of the settings file, key by key. A request is never refused because of the file:
local retention beyond the total one simply has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.errors import ErrorCode
from tiers.config.topic_policy import SAME_AS_TOTAL, UNLIMITED, TopicConfig

REMOTE_STORAGE_ENABLE = "remote.storage.enable"
LOCAL_RETENTION_MS = "local.retention.ms"
LOCAL_RETENTION_BYTES = "local.retention.bytes"
COPY_DISABLE = "remote.log.copy.disable"
DELETE_ON_DISABLE = "remote.log.delete.on.disable"

TIER_DEFAULTS: Mapping[str, str] = {
    REMOTE_STORAGE_ENABLE: "false",
    LOCAL_RETENTION_MS: str(SAME_AS_TOTAL),
    LOCAL_RETENTION_BYTES: str(SAME_AS_TOTAL),
    COPY_DISABLE: "false",
    DELETE_ON_DISABLE: "false",
}
"""Every tier setting of a topic, with Kafka's default."""

BROKER_DEFAULTS: Mapping[str, str] = {"cleanup.policy": "delete", "retention.ms": "604800000", "retention.bytes": "-1"}
"""The broker's settings that the rules check as well, with Kafka's defaults."""

_LONG = re.compile(r"[+-]?[0-9]+")
_MAX_LONG = (1 << 63) - 1


class InvalidTierConfigError(Exception):
    """A setting that is refused. `code` and the text are those that Kafka answers."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_CONFIG) -> None:
        super().__init__(message)
        self.code = code


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
    if int(text) < SAME_AS_TOTAL:
        raise _invalid(key, value, f"Value must be at least {SAME_AS_TOTAL}")
    return str(int(text))


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
        said = {
            REMOTE_STORAGE_ENABLE: str(rule.remote_storage_enable).lower(),
            LOCAL_RETENTION_MS: str(rule.local_retention_ms),
            LOCAL_RETENTION_BYTES: str(rule.local_retention_bytes),
            COPY_DISABLE: str(rule.copy_disable).lower(),
        }
        values |= {
            key: TierValue(value, is_from_file=True) for key, value in said.items() if value != TIER_DEFAULTS[key]
        }
    return values | {key: TierValue(value, is_own=True) for key, value in own.items() if key in TIER_DEFAULTS}


def is_enabled(rule: TopicConfig | None, own: Mapping[str, str]) -> bool:
    return tier_values(rule, own)[REMOTE_STORAGE_ENABLE].value == "true"


def check_tier_config(
    rule: TopicConfig | None, before: Mapping[str, str], after: Mapping[str, str], broker: Mapping[str, str]
) -> None:
    """Checks the change of a topic's own settings from `before` to `after`. Raises `InvalidTierConfigError`.

    `broker` has the values that the topic will have for the keys of `BROKER_DEFAULTS`."""
    if not is_enabled(rule, after):
        if is_enabled(rule, before) and after.get(DELETE_ON_DISABLE) != "true":
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
    for local_key in (LOCAL_RETENTION_BYTES, LOCAL_RETENTION_MS):
        _check_local_retention(local_key, after, broker)


def _check_local_retention(local_key: str, after: Mapping[str, str], broker: Mapping[str, str]) -> None:
    total_key = local_key.removeprefix("local.")
    try:
        total = int(broker[total_key])
    except ValueError:
        return  # the broker refuses the request itself
    local = int(after.get(local_key, SAME_AS_TOTAL))
    if local == SAME_AS_TOTAL:
        return
    if total > UNLIMITED:
        if local == UNLIMITED:
            raise _invalid(local_key, local, f"Value must not be -1 as {total_key} value is set as {total}.")
        if local > total:
            raise _invalid(local_key, local, f"Value must not be more than {total_key} property value: {total}")
    if after.get(COPY_DISABLE) == "true" and local != total:
        raise InvalidTierConfigError(
            f"When `remote.log.copy.disable` is set to true, the `{local_key}` and `{total_key}` must be set to the "
            "identical value because there will be no more logs copied to the remote storage."
        )
