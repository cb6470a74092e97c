"""`Hold`: the reason why an owner leaves something as it is now.

The tasks decide by these values, and `tiers/explain` tells them to operators. So an explanation is the decision itself.
Times are in milliseconds of the wall clock, unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

_NO_VALUES: Final[Mapping[str, int]] = MappingProxyType({})


class HoldReason(StrEnum):
    """The rules that hold a copy, a trim or an expiry. `tiers/explain/words.py` has a sentence for each."""

    COPY_DISABLED = "copy-disabled"
    COPYING_PAUSED = "copying-paused"
    NOT_DUE = "not-due"
    """The records neither fill a segment nor are old enough."""

    NO_LOCAL_RETENTION = "no-local-retention"
    TRIMMING_PAUSED = "trimming-paused"
    NOT_VISIBLE = "not-visible"
    ABOVE_LSO = "above-lso"
    LOCAL_RETENTION = "local-retention"
    NEWEST_SEGMENT = "newest-segment"

    EXPIRING_PAUSED = "expiring-paused"
    RETENTION_UNKNOWN = "retention-unknown"
    """The owner does not know the total retention: the file and the recorded total differ."""
    RETENTION_IN_DOUBT = "retention-in-doubt"
    """The present retention could not be read from the brokers, or they disagree."""
    UNLIMITED_RETENTION = "unlimited-retention"
    TOTAL_RETENTION = "total-retention"
    FUTURE_TIMESTAMP = "future-timestamp"
    """By the time of its copy the segment would have expired, but a record of it has a timestamp in the future."""
    EXPIRY_BUDGET = "expiry-budget"
    """The bytes that may expire in one run are used up."""


@dataclass(frozen=True, slots=True)
class Hold:
    """`at_ms` is the time at which this hold ends by itself; None: it needs an event, or the time cannot be told.

    `values` are the numbers that decide, by the names of their settings or with their units in the name."""

    reason: HoldReason
    at_ms: int | None = None
    values: Mapping[str, int] = field(default_factory=lambda: _NO_VALUES)
