"""All alarms in words. `proxy/commands/alarm_reference.py` generates docs/alarms.md of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from proxy import log_events
from proxy.admin.alarm import Alarm
from proxy.admin.alarms.events import EVENTS
from proxy.admin.alarms.states import STATES

ALARMS: Final = (*STATES, *EVENTS)
BY_NAME: Final[Mapping[str, Alarm]] = {alarm.name: alarm for alarm in ALARMS} | {
    log_events.ALARMS[line]: alarm for alarm in ALARMS for line in alarm.lines
}
"""By the name of the alarm, and by the names of its events in the log."""


def runbook_of(name: str) -> str:
    """Returns the address of the page about an alarm or an event, which the proxy itself serves."""
    known = BY_NAME.get(name)
    return f"/runbook/{quote(name if known is None else known.name, safe='')}"
