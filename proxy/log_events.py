"""The names of the log's events, and the runbook page of each alarm.

A line of the log has the field `event`. The name stays when the words of the message change. A line of the level ERROR
also has the field `runbook`, the page that says what to do. docs/log.md is the list.
"""

from __future__ import annotations

import logging
import re
from typing import Final

RUNBOOKS: Final = "docs/runbook/"
DEFECT: Final = "defect"
_PLACEHOLDER = re.compile(r"%(?:\.\d)?[a-z]")


def phrase(template: str) -> str:
    """Returns the beginning of a message by which an operator recognizes it, up to the first colon."""
    return _PLACEHOLDER.sub("…", template).partition(": ")[0]


ALARMS: Final = {
    # Of a partition or a topic: the names are those of `AlarmReason`.
    "records that are not copied have used half of the broker's retention": "broker-retention-50",
    "records that are not copied have used 80 % of the broker's retention": "broker-retention-80",
    "records that are not copied are beyond the broker's retention": "broker-retention-passed",
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
    "the metadata topic must not be used as it is": "metadata-topic-unusable",
    "the remote log metadata is not followed": "metadata-not-followed",
    "the remote log metadata of one metadata partition is not followed": "metadata-partition-not-followed",
    "a task of the remote log metadata failed": "metadata-task-failed",
    "a read of remote log metadata failed": "metadata-read-failed",
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
    "clients' connections cannot be accepted, trying again": "connections-not-accepted",
    "connections to the admin port cannot be accepted, trying again": "admin-connections-not-accepted",
    "the changed token of the admin port cannot be used, the old one stays": "admin-token-unusable",
    "changed certificates cannot be used, the old ones stay": "certificates-unusable",
    "the spool has damaged a segment whose copy has not ended": "spool-damaged",
    "a segment in the spool cannot be read": "spool-unreadable",
    "the newest segment's indexes cannot be read": "indexes-damaged",
    "nothing was deleted": "nothing-deleted",
    "a process died and is restarted": "process-died",
    "a process did not end in time and is killed": "process-killed",
    "a message between two processes of the proxy was cut": "message-cut",
    "a process of the proxy cannot connect, trying again": "reader-connections-not-accepted",
    "records of the remote reader cannot be mapped": "records-not-mapped",
    # Defects.
    "a read for another process failed": "read-for-another-process-failed",
    "internal error": "internal-error",
    "the tier could not be looked at": "look-failed",
    "the history of the page has a hole": "history-has-a-hole",
    "the remote log manager failed": "remote-log-manager-failed",
    "the tiered topics could not be read": "tiered-topics-unreadable",
    "work of the remote log manager failed": "remote-log-work-failed",
    "a stage of a partition failed": "stage-failed",
    "closing the connection": "connection-closed",
    "no code handles an error": "error-not-handled",
    "an error ended a thread": "thread-ended",
    "remote read failed": "remote-read-failed",
    "a partition cannot be judged": "partition-not-judged",
    "the broker deleted records, but the new log start was not recorded": "log-start-not-recorded",
    "a topic was not deleted, because the deletion could not be recorded": "topic-deletion-not-recorded",
    "the topic's tier settings were not recorded": "tier-settings-not-recorded",
}
"""The events with a line of the level ERROR, by the phrase of the message."""

OTHER_EVENTS: Final = {
    "[upstream.tls] has a certificate, but there is no [upstream.sasl]": "certificate-without-sasl",
    "a broker answers": "brokers-reachable",
    "a broker did not answer who leads the metadata topic": "metadata-leaders-unanswered",
    "a broker does not answer how large its logs are": "log-sizes-unknown",
    "a broker does not answer how topics are configured": "topic-configs-unanswered",
    "a chunk file is damaged and is not used": "chunk-file-damaged",
    "a client left": "client-left",
    "a copy that had not ended is whole, and is finished": "attempt-finished",
    "a client left the TLS handshake": "client-left-handshake",
    "a client failed the TLS handshake": "tls-handshake-failed",
    "a client named a host outside of ASCII in its TLS handshake": "host-name-not-ascii",
    "a client speaks plain text on this TLS port": "plain-text-on-tls-port",
    "a client speaks TLS on this plain-text port": "tls-on-plain-text-port",
    "a failed deletion could not be published": "failed-deletion-not-published",
    "a gap of the log has ended": "gap-ended",
    "a gap of the log has grown": "gap-grown",
    "a heartbeat failed": "heartbeat-failed",
    "a log start has ended": "log-start-ended",
    "a metadata partition has all records again": "metadata-partition-restored",
    "a metadata partition is read again": "metadata-partition-read-again",
    "a partition that stopped goes on": "partition-goes-on",
    "a process of another user is refused": "foreign-process-refused",
    "a segment could not be deleted": "segment-not-deleted",
    "a segment in the spool could not be copied again": "damaged-segment-not-copied",
    "segments in the spool can be stored for their owners again": "spooled-segments-stored-again",
    "the broker answers again how large its logs are": "log-sizes-known",
    "the metadata of a partition knows all copies again": "metadata-complete-again",
    "the store cannot be listed before the first segment": "head-not-listed",
    "it is not known whether the store has records of a hole": "hole-not-listed",
    "a stage of a partition works again": "stage-works-again",
    "a store is down": "store-down",
    "the store answers again": "store-answers-again",
    "a topic that was missing is there again": "missing-topic-returned",
    "all metadata partitions can be read": "metadata-partitions-readable",
    "all processes ended": "processes-ended",
    "an operator paused work on a topic": "work-paused",
    "an operator resumed work on a topic": "work-resumed",
    "broker … at …:… is advertised as …:…": "broker-advertised",
    "changed certificates are in use": "certificates-changed",
    "the settings are reloaded": "settings-reloaded",
    "tiered": "tiered-topics",
    "these changed settings need a restart": "restart-needed",
    "connection refused": "connection-refused",
    "copying goes on": "copying-goes-on",
    "deleted segments are forgotten": "deleted-segments-forgotten",
    "deleted topics can be removed again": "topic-deletion-works-again",
    "the total retention of topics can be recorded again": "total-retentions-recorded",
    "following the remote log metadata": "following-metadata",
    "local index files can be read and written again": "local-indexes-usable",
    "local index files cannot be read or written; the indexes come from the store": "local-indexes-unusable",
    "metadata partitions were assigned": "metadata-partitions-assigned",
    "no broker answers, trying again": "brokers-unreachable",
    "no broker tells the id of a topic": "topic-id-unknown",
    "records expired by the total retention": "records-expired",
    "remote log metadata is read again": "metadata-read-works-again",
    "remote logs of disabled topics are removed again": "disabled-topics-removed-again",
    "removing damaged local index files": "local-indexes-damaged",
    "replacing the child process of a store": "store-process-replaced",
    "serving …:…": "serving",
    "some metadata partitions cannot be read yet": "metadata-partitions-unreadable",
    "starting": "starting",
    "starting the workers": "workers-starting",
    "stopped": "stopped",
    "stopping": "stopping",
    "the broker's answer for the offsets behind a gap cannot be read": "answer-behind-gap-unreadable",
    "the broker's answer to the second poll of local partitions cannot be read": "second-poll-unreadable",
    "the brokers accept the proxy again": "proxy-accepted-again",
    "the brokers' group.min.session.timeout.ms demands longer sessions": "longer-sessions",
    "the bounds of the local log are unknown": "local-bounds-unknown",
    "the changed token of the admin port is in use": "admin-token-changed",
    "the collector takes no traces": "collector-down",
    "the collector takes traces again": "collector-works-again",
    "the cluster's metadata can be read again": "cluster-readable",
    "the cluster's metadata cannot be read": "cluster-unreadable",
    "no broker has answered yet": "no-broker-answers-yet",
    "the coordinator answers heartbeats again": "heartbeats-work-again",
    "a client is about to delete a tiered topic": "topic-deletion-recorded",
    "the disk chunk cache fails and is not used for a while; check the disk": "disk-chunk-cache-failing",
    "the divergence of a metadata partition cannot be saved": "divergence-not-saved",
    "the first record that is not copied cannot be read": "first-uncopied-unreadable",
    "the freshness of the metadata cannot be shared with other processes": "freshness-not-shared",
    "the group cannot be joined": "group-not-joined",
    "the group could not be told that this member leaves": "leave-not-told",
    "the group was joined": "group-joined",
    "the index of a copied segment is not in the local index files; readers fetch it from the store": (
        "local-index-not-written"
    ),
    "the listener for a broker is open now": "listener-open",
    "the local tier was trimmed": "trimmed",
    "the log has no records for some offsets of a segment": "offsets-without-records",
    "the look-up by timestamp failed, the client retries": "timestamp-lookup-failed",
    "the metadata topic can be checked again": "metadata-topic-checkable",
    "the metadata topic cannot be checked": "metadata-topic-uncheckable",
    "the metadata topic was created": "metadata-topic-created",
    "the metadata topic's leaders are known again": "metadata-leaders-known",
    "the metadata topic's leaders are not known": "metadata-leaders-unknown",
    "the objects of deleted segments are deleted once more again": "second-deletion-works-again",
    "the proxy's own rights cannot be read": "rights-unreadable",
    "the remote log metadata cannot be opened yet, trying again": "metadata-not-open",
    "the remote log metadata is followed again": "metadata-followed-again",
    "the remote log metadata is open": "metadata-open",
    "the remote log of a deleted topic was deleted": "topic-deleted",
    "the remote log of a topic that is not tiered any more was deleted": "disabled-topic-removed",
    "the saved remote log metadata is cleared and read again from the topic": "saved-metadata-cleared",
    "the saved remote log metadata is torn": "saved-metadata-torn",
    "the saved remote log metadata of some metadata partitions is cleared and read again from the topic": (
        "saved-metadata-partitions-cleared"
    ),
    "the spool cannot be opened": "spool-not-open",
    "the spool is open": "spool-open",
    "the tier settings were changed": "tier-settings-changed",
    "the tiered topics can be read again": "tiered-topics-readable",
    "the time of the last read to the end cannot be saved": "freshness-not-saved",
    "the topic's tier settings were refused": "tier-settings-refused",
    "the total retention of a topic could not be recorded": "total-retention-not-recorded",
    "the total retention of a topic is recorded": "total-retention-recorded",
    "the retention settings were changed": "retention-settings-changed",
    "the sizes of the remote partitions cannot be read": "remote-sizes-unreadable",
    "the tier can be looked at again": "tier-looked-at-again",
    "the tier cannot be looked at": "tier-not-looked-at",
    "the traceback of the internal error": "traceback",
    "this member joins the group again": "group-joining-again",
    "this process can work as an owner again": "fit-again",
    "this process cannot take over a metadata partition yet": "metadata-partition-not-taken",
    "this process lost the ownership of a metadata partition": "metadata-partition-lost",
    "this process may open … files, but … connections need …": "too-few-open-files",
    "tier settings could not be checked": "tier-settings-not-checked",
    "total retentions can be recorded again": "total-retentions-recorded-again",
    "two brokers disagree on the configuration of topics": "topic-configs-disagree",
    "waiting for the end of processes that an earlier proxy left behind": "waiting-for-earlier-processes",
    "… connections outlived the drain and are aborted": "drain-outlived",
    "it is unknown whether the offset is gone": "offset-unknown",
    "deleted topics could not be found or removed": "topic-deletion-failed",
    "the remote log of a disabled topic could not be removed": "disabled-topic-not-removed",
    "the objects of deleted segments could not be deleted once more": "second-deletion-failed",
    "a segment in the spool could not be stored for its owner": "spooled-segment-not-stored",
    "the total retention of topics could not be recorded": "total-retentions-not-recorded",
}
"""The other events, by the phrase of the message."""

EVENTS: Final = {**ALARMS, **OTHER_EVENTS}

SHARED_PAGES: Final = {
    "broker-retention": ("broker-retention-50", "broker-retention-80", "broker-retention-passed"),
    "metadata": (
        "metadata-topic-unusable", "metadata-not-followed", "metadata-partition-not-followed", "metadata-task-failed",
        "metadata-read-failed",
    ),
    "open-files": (
        "connections-not-accepted", "admin-connections-not-accepted", "reader-connections-not-accepted", "message-cut",
    ),
    DEFECT: (
        "read-for-another-process-failed", "internal-error", "remote-log-manager-failed", "tiered-topics-unreadable",

        "remote-log-work-failed", "stage-failed", "connection-closed", "remote-read-failed",
        "partition-not-judged", "log-start-not-recorded", "topic-deletion-not-recorded", "tier-settings-not-recorded",
        "look-failed", "history-has-a-hole", "error-not-handled", "thread-ended",
    ),
    "spool-damaged": ("spool-damaged", "spool-unreadable"),
}  # fmt: skip
"""The runbook pages of several alarms. Every other alarm has a page of its name."""

_PAGE_OF: Final = {event: page for page, events in SHARED_PAGES.items() for event in events}


def page_of(alarm: str) -> str:
    """Returns the name of the runbook page of an alarm."""
    return _PAGE_OF.get(alarm, alarm)


def runbook_of(alarm: str) -> str:
    """Returns the path of the runbook page of an alarm, relative to the root of the repository."""
    return f"{RUNBOOKS}{page_of(alarm)}.md"


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    """Returns the fields that the catalogue adds to a line of the log; none for a line of a library."""
    said = phrase(str(record.msg))
    if record.levelno >= logging.ERROR and said in ALARMS:
        return {"event": ALARMS[said], "runbook": runbook_of(ALARMS[said])}
    return {"event": EVENTS[said]} if said in EVENTS else {}
