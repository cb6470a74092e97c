"""`RemoteLogAlarms`: the alarms about partitions and topics, as a counter of their beginnings and as their state now.

docs/alarms.md says what each of them means.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import Counter, Gauge


class AlarmReason(StrEnum):
    """The values of the label `reason`."""

    BROKER_RETENTION_50 = "broker-retention-50"
    BROKER_RETENTION_80 = "broker-retention-80"
    BROKER_RETENTION_PASSED = "broker-retention-passed"
    CUT = "cut"
    CLOCK_SKEW = "clock-skew"
    COPY_LAG = "copy-lag"
    COPY_STALLED = "copy-stalled"
    CUSTOM_METADATA = "custom-metadata"
    DIVERGED = "diverged"
    FUTURE_TIMESTAMP = "future-timestamp"
    GAP = "gap"
    METADATA_LOST = "metadata-lost"
    RETENTION_DIFFERS = "retention-differs"
    STAGE_FAILING = "stage-failing"
    STUCK_LSO = "stuck-lso"
    TOPICS_MISSING = "topics-missing"
    UNCOPIED_BEGINNING = "uncopied-beginning"


EVENTS = frozenset({AlarmReason.GAP, AlarmReason.CUT})
"""The alarms that tell what has happened, and so have no state. Gaps and void segments have gauges."""
STATES = tuple(reason for reason in AlarmReason if reason not in EVENTS)


@dataclass(frozen=True, slots=True)
class ActiveAlarm:
    """An alarm that has begun and has not ended. `detail` says why; empty: the reason says all."""

    topic: str
    reason: AlarmReason
    about: str
    detail: str


class RemoteLogAlarms:
    """`about` is what has the alarm: a partition, or one of its stages. Empty: the topic itself.

    The code that finds a trouble keeps the episodes: it calls `begin` once, or again for each attempt that fails. The
    gauge and the page show what is active here."""

    def __init__(self, counter: Counter, gauge: Gauge) -> None:
        self.counter = counter
        self.gauge = gauge
        self._active: dict[str, dict[AlarmReason, dict[str, str]]] = {}
        """By topic and reason: the details of the alarms that have not ended, by what has them."""

    def happened(self, topic: str, reason: AlarmReason) -> None:
        """Counts an alarm without a state, one of `EVENTS`."""
        self._active.setdefault(topic, {})
        self.counter.labels(topic, reason).inc()

    def begin(self, topic: str, reason: AlarmReason, about: str = "", detail: str = "") -> bool:
        """Begins an alarm, or begins it again with another detail. Returns whether it was not raised before.

        `reason` is one of `STATES`."""
        self.counter.labels(topic, reason).inc()
        active = self._active.setdefault(topic, {}).setdefault(reason, {})
        is_new = about not in active
        active[about] = detail
        self._show(topic, reason)
        return is_new

    def tell(self, topic: str, reason: AlarmReason, about: str, detail: str) -> None:
        """Gives an alarm another detail, if it is raised now."""
        active = self._active.get(topic, {}).get(reason, {})
        if about in active:
            active[about] = detail

    def end(self, topic: str, reason: AlarmReason, about: str = "") -> None:
        """Ends an alarm. Does nothing if there is none."""
        if about in self._active.get(topic, {}).get(reason, ()):
            del self._active[topic][reason][about]
            self._show(topic, reason)

    def forget(self, topic: str, about: str) -> None:
        """Ends all alarms about a partition and its stages, because this process does not own it any more."""
        for reason, active in self._active.get(topic, {}).items():
            for each in [each for each in active if _is_of(each, about)]:
                del active[each]
            self._show(topic, reason)

    def active(self) -> Iterator[ActiveAlarm]:
        """Yields the alarms that are raised now."""
        for topic, reasons in self._active.items():
            for reason, active in reasons.items():
                yield from (ActiveAlarm(topic, reason, about, detail) for about, detail in active.items())

    def reasons_of(self, topic: str, about: str) -> set[AlarmReason]:
        """Returns the alarms about a partition and its stages that are raised now."""
        reasons = self._active.get(topic, {})
        return {reason for reason, active in reasons.items() if any(_is_of(each, about) for each in active)}

    def has_any(self, topic: str) -> bool:
        return any(self._active.get(topic, {}).values())

    @property
    def topics(self) -> Set[str]:
        """The topics that have had an alarm."""
        return self._active.keys()

    def remove_topic(self, topic: str) -> None:
        """Forgets a topic without an alarm. `RemoteLogManagerMetrics` removes its series."""
        self._active.pop(topic, None)

    def _show(self, topic: str, reason: AlarmReason) -> None:
        self.gauge.labels(topic, reason).set(len(self._active[topic][reason]))


def _is_of(about: str, partition: str) -> bool:
    """Whether `about` is the partition, or one of its stages."""
    return about == partition or about.startswith(f"{partition} ")
