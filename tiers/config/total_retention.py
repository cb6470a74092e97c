"""`TotalRetention`: a topic's total retention over both tiers, if it is not the broker's `retention.*`.

* A total counts only when it is recorded in the topic's tier settings. A line in the settings file alone counts for
  nothing: see `policy_of`.
* If a topic has one of the two keys, the broker's `retention.*` bounds the local tier alone. The key that is missing
  then stands for unlimited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

RETENTION_MINUTES: Final = "remote.log.retention.minutes"
RETENTION_BYTES: Final = "remote.log.retention.bytes"
TOTAL_KEYS: Final = (RETENTION_MINUTES, RETENTION_BYTES)

UNLIMITED: Final = -1
MS_PER_MINUTE: Final = 60_000
MAX_MINUTES: Final = ((1 << 63) - 1) // MS_PER_MINUTE

REPLACED_KEYS: Final[Mapping[str, str]] = {
    "remote.log.retention.ms": RETENTION_MINUTES,
    "remote.log.retention.hours": RETENTION_MINUTES,
    "remote.log.retention.days": RETENTION_MINUTES,
    "remote.log.retention.size": RETENTION_BYTES,
    "remote.retention.ms": RETENTION_MINUTES,
    "remote.retention.minutes": RETENTION_MINUTES,
    "remote.retention.bytes": RETENTION_BYTES,
}
"""Keys that do not exist, and the keys to use instead of them."""

BROKERS_KEYS: Final[Mapping[str, str]] = {
    "retention.ms": RETENTION_MINUTES,
    "retention.minutes": RETENTION_MINUTES,
    "retention.hours": RETENTION_MINUTES,
    "retention.bytes": RETENTION_BYTES,
    "log.retention.ms": RETENTION_MINUTES,
    "log.retention.minutes": RETENTION_MINUTES,
    "log.retention.hours": RETENTION_MINUTES,
    "log.retention.bytes": RETENTION_BYTES,
}
"""Keys of the brokers, and the keys of the settings file that have a similar meaning."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A retention in time and in bytes. -1 is unlimited."""

    ms: int
    size_bytes: int

    def is_shorter_than(self, other: Retention) -> bool:
        """Returns whether this retention is shorter in time, or in bytes, or in both."""
        return _limit(self.ms) < _limit(other.ms) or _limit(self.size_bytes) < _limit(other.size_bytes)

    def __str__(self) -> str:
        time = "unlimited time" if self.ms == UNLIMITED else f"{self.ms} ms"
        size = "unlimited bytes" if self.size_bytes == UNLIMITED else f"{self.size_bytes} bytes"
        return f"{time}, {size}"


NOTHING_EXPIRES: Final = Retention(UNLIMITED, UNLIMITED)


@dataclass(frozen=True, slots=True)
class TotalRetention:
    """The values of `TOTAL_KEYS`. None: the key is missing."""

    minutes: int | None = None
    size_bytes: int | None = None

    @property
    def is_set(self) -> bool:
        return self.minutes is not None or self.size_bytes is not None

    def over(self, broker: Retention) -> Retention:
        """Returns the total retention of a topic with these keys. `broker` is the broker's retention of the topic."""
        if not self.is_set:
            return broker
        minutes = UNLIMITED if self.minutes is None else self.minutes
        size_bytes = UNLIMITED if self.size_bytes is None else self.size_bytes
        return Retention(UNLIMITED if minutes == UNLIMITED else minutes * MS_PER_MINUTE, size_bytes)

    def contradicts(self, recorded: TotalRetention) -> bool:
        """Returns whether any key of this total has another value in `recorded`. A missing key contradicts nothing."""
        return self.minutes not in (None, recorded.minutes) or self.size_bytes not in (None, recorded.size_bytes)

    def config(self) -> dict[str, str]:
        """Returns the keys as tier settings of a topic."""
        values = {RETENTION_MINUTES: self.minutes, RETENTION_BYTES: self.size_bytes}
        return {key: str(value) for key, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.config().items()) or "none"


NO_TOTAL: Final = TotalRetention()


def recorded_total(config: Mapping[str, str]) -> TotalRetention:
    """Returns the total in a topic's own tier settings. Raises `ValueError` for a value that is not valid."""
    minutes, size_bytes = (None if key not in config else int(config[key]) for key in TOTAL_KEYS)
    if not all(value is None or value >= UNLIMITED for value in (minutes, size_bytes)):
        raise ValueError(f"the recorded total retention is not valid: {dict(config)}")
    return TotalRetention(minutes, size_bytes)


def longest_total(totals: list[TotalRetention]) -> TotalRetention:
    """Returns the total that is in no key shorter than any of `totals`.

    If some have no key, the retention that they stand for is unknown here. The result is then unlimited."""
    if len(set(totals)) == 1:
        return totals[0]
    if not all(each.is_set for each in totals):
        return TotalRetention(UNLIMITED, UNLIMITED)
    ends = [each.over(NOTHING_EXPIRES) for each in totals]
    ms = max((end.ms for end in ends), key=_limit)
    size_bytes = max((end.size_bytes for end in ends), key=_limit)
    return TotalRetention(UNLIMITED if ms == UNLIMITED else ms // MS_PER_MINUTE, size_bytes)


def _limit(value: int) -> float:
    return math.inf if value == UNLIMITED else value
