"""`RemoteLogAlarms`: the alarms about partitions and topics, as a counter of their beginnings and as their state now.

docs/alarms.md says what each of them means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import Counter, Gauge

from tiers.errors import Peer


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
    """An alarm that has begun and has not ended. `detail` says why; empty: the reason says all.

    `waits_for`: who does not answer, if that is why."""

    topic: str
    reason: AlarmReason
    about: str
    detail: str
    waits_for: Peer | None = None


class RemoteLogAlarms:
    """`about` is what has the alarm: a partition, or one of its stages. Empty: the topic itself.

    An alarm is raised once per episode, however often the code that finds the trouble reports it."""

    def __init__(self, counter: Counter, gauge: Gauge) -> None:
        self.counter = counter
        self.gauge = gauge
        self._active: dict[str, dict[tuple[AlarmReason, str], ActiveAlarm]] = {}
        """By topic: the alarms that have not ended, by reason and by what has them."""

    def happened(self, topic: str, reason: AlarmReason) -> None:
        """Counts an alarm without a state, one of `EVENTS`."""
        self._active.setdefault(topic, {})
        self.counter.labels(topic, reason).inc()

    def begin(
        self, topic: str, reason: AlarmReason, about: str = "", detail: str = "", waits_for: Peer | None = None
    ) -> bool:
        """Raises an alarm, one of `STATES`, or gives it another detail. Returns whether it was not raised before."""
        active = self._active.setdefault(topic, {})
        is_new = (reason, about) not in active
        active[reason, about] = ActiveAlarm(topic, reason, about, detail, waits_for)
        if is_new:
            self.counter.labels(topic, reason).inc()
            self.gauge.labels(topic, reason).inc()
        return is_new

    def end(self, topic: str, reason: AlarmReason, about: str = "") -> bool:
        """Ends an alarm. Returns whether it was raised."""
        was_raised = self._active.get(topic, {}).pop((reason, about), None) is not None
        if was_raised:
            self.gauge.labels(topic, reason).dec()
        return was_raised

    def end_others(self, reason: AlarmReason, raised: Collection[tuple[str, str]]) -> None:
        """Ends the alarms of a reason, except those of these topics and what has them."""
        for each in list(self.active()):
            if each.reason is reason and (each.topic, each.about) not in raised:
                self.end(each.topic, reason, each.about)

    def forget(self, topic: str, about: str) -> None:
        """Ends all alarms about a partition and its stages, because this process does not own it any more."""
        for reason, each in list(self._active.get(topic, ())):
            if _is_of(each, about):
                self.end(topic, reason, each)

    def active(self) -> Iterator[ActiveAlarm]:
        """Yields the alarms that are raised now."""
        for active in self._active.values():
            yield from active.values()

    def reasons_of(self, topic: str, about: str) -> set[AlarmReason]:
        """Returns the alarms about a partition and its stages that are raised now."""
        return {reason for reason, each in self._active.get(topic, ()) if _is_of(each, about)}

    def has_any(self, topic: str) -> bool:
        return bool(self._active.get(topic))

    @property
    def topics(self) -> Set[str]:
        """The topics that have had an alarm."""
        return self._active.keys()

    def remove_topic(self, topic: str) -> None:
        """Forgets a topic without an alarm. `RemoteLogManagerMetrics` removes its series."""
        self._active.pop(topic, None)


def _is_of(about: str, partition: str) -> bool:
    """Whether `about` is the partition, or one of its stages."""
    return about == partition or about.startswith(f"{partition} ")
