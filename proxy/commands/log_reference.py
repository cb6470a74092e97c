"""Generates `docs/log.md` from the catalogue of events: `python -m proxy.commands.log_reference > docs/log.md`."""

from __future__ import annotations

import sys

from proxy.log_events import ALARMS, OTHER_EVENTS, page_of

INTRODUCTION = """\
# The log

One line is one event. `[log] format = "json"` gives objects, one a line; `"text"` gives `key=value` behind the message.
`proxy/commands/log_reference.py` generates this page from the code.

| Field | Meaning |
|---|---|
| `time` | UTC, in milliseconds |
| `level` | `error`: an operator must act. `warning`: something is wrong, and Tidegate goes on. `info`, `debug` |
| `event` | the name of the event, which stays when the words of the message change; libraries' lines have none |
| `runbook` | for an alarm: the page that says what to do |
| `message` | what happened |
| others | what it is about: `partition`, `topic`, `client`, `error`, ... |

A line that repeats comes when its reason begins, at growing intervals while it lasts, and when it ends. A proxy that is
idle logs nothing. The lines about connections are limited to 20 a minute for each cause, because clients decide how
many there are: the field `lines_left_out` says how many lines were left out, and the metrics count all of them.
"""


def reference() -> str:
    lines = [INTRODUCTION, "## Alarms", "", "| Event | Message | Runbook |", "|---|---|---|"]
    lines += [
        f"| `{event}` | {said} | [{page_of(event)}](runbook/{page_of(event)}.md) |"
        for said, event in sorted(ALARMS.items(), key=lambda each: each[1])
    ]
    lines += ["", "The same events have the level WARNING or INFO where Tidegate tries again.", ""]
    lines += ["## Other events", "", "| Event | Message |", "|---|---|"]
    lines += [f"| `{event}` | {said} |" for said, event in sorted(OTHER_EVENTS.items(), key=lambda each: each[1])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
