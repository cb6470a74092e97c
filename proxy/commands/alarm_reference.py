"""Generates `docs/alarms.md` from the catalogue: `python -m proxy.commands.alarm_reference > docs/alarms.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from proxy.admin.alarm import Alarm, Kind
from proxy.admin.alarms.catalogue import ALARMS

INTRODUCTION = """\
# Alarms

The log lines with the level ERROR ask an operator to act. Each has the field `runbook`, a page of
[the runbook](runbook/index.md) that says what happens, what is at risk, how to look, what to do, and when it ends.
`proxy/commands/alarm_reference.py` generates this page from the code.

- A **state** lasts. Its gauge is above 0 until it ends. The overview of the page and `/api/v1/overview` show it
  meanwhile. Its line comes once when its reason begins, and again when the reason comes back after it ended.
- An **event** has happened, and has no end. The overview shows the last lines of the log with the level ERROR: at most
  three of each event since the process started. Several events have a counter.

`deploy/prometheus/tidegate-alerts.yaml` has an alert rule for each state, and for each event with a counter. Alert also
on a proxy whose `/readyz` does not answer 200.
"""
_OF_STATES = ("Alarm", "Log line", "Meaning", "What Tidegate has stopped", "What to do", "Runbook")
_WITH_METRIC = ("Alarm", "Metric", *_OF_STATES[1:])
SECTIONS = (
    (
        "States of topics and partitions",
        """\
The gauge `tidegate_remote_log_alarm` has the labels `topic` and `reason`. It is the number of partitions, stages or
topics that have the alarm now. The log names the partition. The counter `tidegate_remote_log_alarms_total` has the same
labels, and is the number of beginnings.""",
        Kind.TOPIC,
        _OF_STATES,
    ),
    ("States of the remote tier", "Each has a gauge of its own.", Kind.TIER, _WITH_METRIC),
    (
        "States of a process",
        """\
The gauge `tidegate_process_alarm` has the label `alarm`. It is the number of these troubles that the process has
now.""",
        Kind.PROCESS,
        _OF_STATES,
    ),
    (
        "Events",
        """\
`tidegate_remote_log_gap_offsets` and `tidegate_remote_log_recorded_cuts` show what is left of `gap` and `cut`.""",
        Kind.EVENT,
        _WITH_METRIC,
    ),
)


def reference() -> str:
    lines = [INTRODUCTION]
    for title, sentence, kind, columns in SECTIONS:
        lines += [f"## {title}", "", sentence, ""]
        lines += [*_table([alarm for alarm in ALARMS if alarm.kind is kind], columns), ""]
    return "\n".join(lines[:-1]) + "\n"


def _table(alarms: Sequence[Alarm], columns: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---' for _ in columns)}|"
    for alarm in alarms:
        cells = {
            "Alarm": f"`{alarm.name}`",
            "Metric": f"`{alarm.metric}`" if alarm.metric else "none",
            "Log line": "<br>".join(alarm.lines),
            "Meaning": alarm.meaning,
            "What Tidegate has stopped": alarm.stopped,
            "What to do": alarm.action,
            "Runbook": f"[{alarm.runbook}](runbook/{alarm.runbook}.md)",
        }
        yield f"| {' | '.join(cells[column] for column in columns)} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
