"""The names of the log's events, and the runbook page of each alarm.

A line of the log has the field `event`, the beginning of its message in one word. A line of the level ERROR also has
the field `runbook`, the page that says what to do.
"""

from __future__ import annotations

import logging
import re
from typing import Final

_PLACEHOLDER = re.compile(r"%(?:\.\d)?[a-z]")
_OWN: Final = ("proxy", "tiers")


def phrase(template: str) -> str:
    """Returns the beginning of a message by which an operator recognizes it, up to the first colon."""
    return _PLACEHOLDER.sub("…", template).partition(": ")[0]


def event_of(template: str) -> str:
    """Returns the name of the event of a message, for example `copying-goes-on`."""
    return re.sub(r"[^a-z0-9]+", "-", phrase(template).lower()).strip("-")


ALARMS: Final = {
    # Of a partition or a topic.
    "records that are not copied have used half of the broker's retention": "broker-retention",
    "records that are not copied have used 80 % of the broker's retention": "broker-retention",
    "records that are not copied are beyond the broker's retention": "broker-retention",
    "another leader's records replaced copied records": "cut",
    "nothing expires while this machine's clock and the brokers' clock differ": "clock-skew",
    "copying is behind by more than half of the retention": "copy-lag",
    "copying makes no progress": "copy-stalled",
    "copying stops": "custom-metadata",
    "the log diverged from the copied records": "diverged",
    "a timestamp in the future keeps records from expiring": "future-timestamp",
    "the broker removed records before they were copied": "gap",
    "the metadata of a partition was lost": "metadata-lost",
    "the total retention in the settings file is not the recorded one": "retention-differs",
    "a stage of a partition keeps failing": "stage-failing",
    "the store does not answer": "store-failing",
    "the last stable offset stands still": "stuck-lso",
    "no broker knows a tiered topic any more, and its deletion is not proved": "topics-missing",
    "the local log has uncopied records before copied ones": "uncopied-beginning",
    # Of a process or the tier.
    "the metadata topic must not be used as it is": "metadata",
    "the remote log metadata is not followed": "metadata",
    "the remote log metadata of one metadata partition is not followed": "metadata",
    "a task of the remote log metadata failed": "metadata",
    "a read of remote log metadata failed": "metadata",
    "foreign records in the remote log metadata topic are skipped": "foreign-records",
    "a bound between the tiers does not hold": "bounds-violation",
    "the offset lies above the log start, but neither tier has it": "in-neither-tier",
    "this process cannot work as an owner, and keeps partitions only while no other process can": "unfit",
    "a topic cannot be tiered": "refused-topic",
    "no broker has answered for a minute": "no-broker-answers",
    "the brokers reject the proxy": "proxy-rejected",
    "… lacks …": "missing-right",
    "the listener for broker … cannot be opened": "listener-not-open",
    "two proxies of the cluster have different settings": "settings-differ",
    "the settings are not reloaded, because they are wrong": "settings-not-reloaded",
    "clients' connections cannot be accepted, trying again": "open-files",
    "connections to the admin port cannot be accepted, trying again": "open-files",
    "the changed token of the admin port cannot be used, the old one stays": "admin-token-unusable",
    "changed certificates cannot be used, the old ones stay": "certificates-unusable",
    "the spool has damaged a segment whose copy has not ended": "spool-damaged",
    "a segment in the spool cannot be read": "spool-damaged",
    "the newest segment's indexes cannot be read": "indexes-damaged",
    "nothing was deleted": "nothing-deleted",
    "a process died and is restarted": "process-died",
    "a process did not end in time and is killed": "process-killed",
    "a message between two processes of the proxy was cut": "open-files",
    "a process of the proxy cannot connect, trying again": "open-files",
    "records of the remote reader cannot be mapped": "records-not-mapped",
    # Defects.
    "a read for another process failed": "defect",
    "internal error": "defect",
    "the tier could not be looked at": "defect",
    "the history of the page has a hole": "defect",
    "the remote log manager failed": "defect",
    "the tiered topics could not be read": "defect",
    "work of the remote log manager failed": "defect",
    "a stage of a partition failed": "defect",
    "closing the connection": "defect",
    "no code handles an error": "defect",
    "an error ended a thread": "defect",
    "remote read failed": "defect",
    "a partition cannot be judged": "defect",
    "the broker deleted records, but the new log start was not recorded": "defect",
    "a topic was not deleted, because the deletion could not be recorded": "defect",
    "the topic's tier settings were not recorded": "defect",
}
"""The runbook pages of the lines with the level ERROR, by the phrase of the message."""


def page_of(record: logging.LogRecord) -> str | None:
    """Returns the runbook page of a line of the log; None: the line is no alarm."""
    return ALARMS.get(phrase(str(record.msg))) if record.levelno >= logging.ERROR else None


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    """Returns the fields that are made of a line of the log; none for a line of a library."""
    if record.name.partition(".")[0] not in _OWN:
        return {}
    page = page_of(record)
    runbook = {} if page is None else {"runbook": f"docs/runbook/{page}.md"}
    return {"event": event_of(str(record.msg)), **runbook}
