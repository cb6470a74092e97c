"""`Alarm`: a line of the log with the level ERROR in words: what it means, what Tidegate has stopped, and what to do.

An alarm is a state or an event. A state is raised now: it has a gauge, and the page shows it until it ends. An event
tells what has happened. The page keeps the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from proxy.log_events import page_of


class Kind(StrEnum):
    TOPIC = "topic"
    """A state of a topic, a partition or a stage. Its gauge is `tidegate_remote_log_alarm`."""
    TIER = "tier"
    """A state of the remote tier in a process. It has a gauge of its own."""
    PROCESS = "process"
    """A state of a process. Its gauge is `tidegate_process_alarm`."""
    EVENT = "event"


STATES = frozenset({Kind.TOPIC, Kind.TIER, Kind.PROCESS})
_GAUGES = {
    Kind.TOPIC: ("tidegate_remote_log_alarm", "reason"),
    Kind.PROCESS: ("tidegate_process_alarm", "alarm"),
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """`name` is the event of its line of the log, or the page that several events share. `lines` are phrases of
    `proxy/log_events.py`. The other texts are Markdown: words in backquotes, and links to documents.

    `metric` is the gauge of a state of the kind `TIER`, or the counter of an event, as a series in the words of PromQL;
    empty: the event has no counter.
    `heading` is for a line with a placeholder."""

    name: str
    kind: Kind
    lines: tuple[str, ...]
    meaning: str
    stopped: str
    action: str
    metric: str = ""
    heading: str = ""

    @property
    def title(self) -> str:
        return self.heading or self.lines[0]

    @property
    def is_state(self) -> bool:
        return self.kind in STATES

    @property
    def series(self) -> str:
        """The series that shows the alarm, in the words of PromQL; empty: none does."""
        if self.kind not in _GAUGES:
            return self.metric
        gauge, label = _GAUGES[self.kind]
        return f'{gauge}{{{label}="{self.name}"}}'

    @property
    def runbook(self) -> str:
        """The name of its page in docs/runbook."""
        return page_of(self.name)
