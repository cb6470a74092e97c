"""`ProcessAlarms`: the alarms about a process itself that are raised now, as a gauge and for the page.

The part that has the trouble keeps it, and these alarms ask it. docs/alarms.md says what each of them means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

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
    STORE_FAILING = "store-failing"


class HasTrouble(Protocol):
    @property
    def trouble(self) -> str:
        """What is wrong now; empty: nothing."""


class Trouble(NamedTuple):
    """A trouble that lasts now, of which more is known than a line of text. `about` is what has it."""

    detail: str
    about: str = THIS_PROCESS
    since_ms: int | None = None


def troubles_of(*parts: HasTrouble | None) -> list[str]:
    return [part.trouble for part in parts if part is not None and part.trouble]


Troubles = Callable[[], Iterable[str | Trouble]]


class ProcessAlarms(Collector):
    def __init__(self) -> None:
        self._watched: list[tuple[ProcessAlarm, Troubles]] = []

    def watch(self, alarm: ProcessAlarm, troubles: Troubles) -> None:
        """`troubles` returns those of a part that last now. An alarm may have several parts."""
        self._watched.append((alarm, troubles))

    def raised(self) -> list[RaisedAlarm]:
        """Returns one alarm for each trouble."""
        return [
            RaisedAlarm(alarm.value, trouble.about, trouble.detail, since_ms=trouble.since_ms)
            for each in ProcessAlarm
            for alarm, troubles in self._watched
            if alarm is each
            for said in troubles()
            for trouble in [said if isinstance(said, Trouble) else Trouble(said)]
        ]

    def collect(self) -> Iterator[Metric]:
        names = [each.name for each in self.raised()]
        family = ALARM.family()
        for alarm in ProcessAlarm:
            family.add_metric([alarm.value], names.count(alarm.value))
        yield family
