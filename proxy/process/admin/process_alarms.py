"""`ProcessAlarms`: the alarms about a process itself that are raised now, as a gauge and for the page.

The part that has the trouble keeps it, and these alarms ask it. docs/alarms.md says what each of them means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Final, Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proxy.admin.facts import THIS_PROCESS, RaisedAlarm
from tiers.metric_spec import GaugeSpec

ALARM: Final = GaugeSpec("tidegate_process_alarm", "Troubles of the process that last now, by alarm.", ("alarm",))


class ProcessAlarm(StrEnum):
    """The values of the label `alarm`."""

    ADMIN_TOKEN_UNUSABLE = "admin-token-unusable"
    CERTIFICATES_UNUSABLE = "certificates-unusable"
    LISTENER_NOT_OPEN = "listener-not-open"
    MISSING_RIGHT = "missing-right"
    NO_BROKER_ANSWERS = "no-broker-answers"
    PROXY_REJECTED = "proxy-rejected"
    SETTINGS_DIFFER = "settings-differ"
    SETTINGS_NOT_RELOADED = "settings-not-reloaded"


class HasTrouble(Protocol):
    @property
    def trouble(self) -> str:
        """What is wrong now; empty: nothing."""


def troubles_of(*parts: HasTrouble | None) -> list[str]:
    return [part.trouble for part in parts if part is not None and part.trouble]


class ProcessAlarms(Collector):
    def __init__(self) -> None:
        self._watched: list[tuple[ProcessAlarm, Callable[[], Iterable[str]]]] = []

    def watch(self, alarm: ProcessAlarm, troubles: Callable[[], Iterable[str]]) -> None:
        """`troubles` returns those of a part that last now, one line each. An alarm may have several parts."""
        self._watched.append((alarm, troubles))

    def raised(self) -> list[RaisedAlarm]:
        """Returns one alarm for each trouble."""
        return [
            RaisedAlarm(alarm.value, THIS_PROCESS, said)
            for each in ProcessAlarm
            for alarm, troubles in self._watched
            if alarm is each
            for said in troubles()
        ]

    def collect(self) -> Iterator[Metric]:
        names = [each.name for each in self.raised()]
        family = ALARM.family()
        for alarm in ProcessAlarm:
            family.add_metric([alarm.value], names.count(alarm.value))
        yield family
