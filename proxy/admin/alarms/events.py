"""The alarms that are events, in words: what has happened, and defects."""

from __future__ import annotations

from typing import Final

from proxy.admin.alarm import Alarm, Kind, defect

EVENTS: Final[tuple[Alarm, ...]] = (
    Alarm(
        "gap",
        Kind.EVENT,
        ("the broker removed records before they were copied",),
        "Records are lost: the broker's retention or an administrator removed them.",
        "Nothing.",
        'Find out why copying was late. See "Gaps" in [recovery.md](recovery.md).',
        metric='tidegate_remote_log_alarms_total{reason="gap"}',
    ),
    Alarm(
        "cut",
        Kind.EVENT,
        ("another leader's records replaced copied records",),
        "An unclean election replaced the end of the log, or an operator accepted the leader's log.",
        "Nothing.",
        "Look at the replaced records: `tidegate tier segments` shows what is void. If no operator accepted the log,"
        " find out why the election was unclean.",
        metric='tidegate_remote_log_alarms_total{reason="cut"}',
    ),
    Alarm(
        "foreign-records",
        Kind.EVENT,
        ("foreign records in the remote log metadata topic are skipped",),
        "Another program wrote to the metadata topic.",
        "Nothing.",
        "Take WRITE on the topic from all principals except the proxies'.",
        metric="tidegate_remote_log_metadata_foreign_records_total",
    ),
    Alarm(
        "bounds-violation",
        Kind.EVENT,
        ("a bound between the tiers does not hold",),
        "The two tiers do not fit together.",
        "Nothing.",
        "Run `tidegate tier bounds` and `tidegate tier verify`.",
        metric="tidegate_bounds_violations_total",
    ),
    Alarm(
        "in-neither-tier",
        Kind.EVENT,
        ("the offset lies above the log start, but neither tier has it",),
        "A client asked for a record that is probably lost.",
        "Nothing. The client gets error 9, which it retries.",
        "Run `tidegate tier bounds`. If the owner found a gap, the client goes on by itself.",
        metric="tidegate_remote_fetch_in_neither_tier_total",
    ),
    Alarm(
        "connections-not-accepted",
        Kind.EVENT,
        ("clients' connections cannot be accepted, trying again",),
        "The process has no file descriptor left.",
        "New connections wait.",
        "Raise the limit of open files, or lower `max.connections`.",
    ),
    Alarm(
        "admin-connections-not-accepted",
        Kind.EVENT,
        ("connections to the admin port cannot be accepted, trying again",),
        "The process has no file descriptor left.",
        "New connections to the admin port wait, those of health checks too.",
        "Raise the limit of open files, or lower `max.connections`.",
    ),
    Alarm(
        "spool-damaged",
        Kind.EVENT,
        ("the spool has damaged a segment whose copy has not ended",),
        "The disk of the spool changed a segment whose copy had failed.",
        "Nothing. If the broker has removed the records meanwhile, they are lost, and leave a gap.",
        "Check the disk.",
    ),
    Alarm(
        "spool-unreadable",
        Kind.EVENT,
        ("a segment in the spool cannot be read",),
        "A later release wrote the files of a segment whose copy has not ended, or the disk damaged them.",
        "Nothing. The files stay in the spool.",
        "Start the later release on this machine. If the disk damaged the files, remove them.",
    ),
    Alarm(
        "indexes-damaged",
        Kind.EVENT,
        ("the newest segment's indexes cannot be read",),
        "The `.indexes` object is missing or damaged.",
        "Nothing: the next segment is copied without its producer state.",
        "Run `tidegate tier verify` for the partition.",
    ),
    Alarm(
        "nothing-deleted",
        Kind.EVENT,
        ("nothing was deleted",),
        "A client asked for DeleteRecords of a diverged partition, or the check of the partition failed.",
        "The request: the client gets POLICY_VIOLATION, or an error that it retries.",
        ('For another history, see "A partition stops" in [recovery.md](recovery.md). Otherwise report the defect.'),
    ),
    Alarm(
        "process-died",
        Kind.EVENT,
        ("a process died and is restarted",),
        "A worker, the remote log process or the remote reader ended.",
        "Its connections, copying, or reads of the remote tier, until it runs again.",
        "Look at the lines before it, and at the memory limit.",
        metric="tidegate_process_restarts_total",
    ),
    Alarm(
        "reader-connections-not-accepted",
        Kind.EVENT,
        ("a process of the proxy cannot connect, trying again",),
        "The remote reader or the remote log process has no file descriptor left.",
        "Reads of the remote tier, and changes of the metadata, by a worker that starts.",
        "Raise the limit of open files.",
    ),
    Alarm(
        "message-cut",
        Kind.EVENT,
        ("a message between two processes of the proxy was cut",),
        "A worker or the remote reader has no file descriptor left.",
        "One read or more: the worker asks again, at the latest after the deadline of the read.",
        "Raise the limit of open files.",
    ),
    Alarm(
        "records-not-mapped",
        Kind.EVENT,
        ("records of the remote reader cannot be mapped",),
        "A worker has no room for another memory map.",
        "Nothing: the worker asks again.",
        "Raise `vm.max_map_count`, or the memory limit of the process.",
    ),
    Alarm(
        "process-killed",
        Kind.EVENT,
        ("a process did not end in time and is killed",),
        "A process did not end after SIGTERM.",
        "Its open requests.",
        "Raise `drain.timeout.ms` if clients' requests take longer.",
    ),
    defect(
        "read-for-another-process-failed",
        "a read for another process failed",
        "One read: the client gets an error that it retries.",
    ),
    defect("internal-error", "internal error", "The process ends, and the supervisor restarts it."),
    defect(
        "remote-log-manager-failed",
        "the remote log manager failed",
        "Copying, trimming and expiration in this process, until a restart.",
    ),
    defect(
        "tiered-topics-unreadable",
        "the tiered topics could not be read",
        "New topics and new settings. The copying of the known topics goes on.",
    ),
    defect(
        "remote-log-work-failed",
        "work of the remote log manager failed",
        "The work that the warning before it names, until its next attempt.",
    ),
    defect(
        "stage-failed",
        "a stage of a partition failed",
        (
            "The stage that the field `stage` names, until its next attempt. The survey stops all stages of the "
            "partition. While the stage keeps failing, the log has a line at the 1st, 2nd, 4th, 8th failure and so "
            "on."
        ),
    ),
    defect("look-failed", "the tier could not be looked at", "The page and its API, which show the last look."),
    defect("history-has-a-hole", "the history of the page has a hole", "The sparklines of the page, for 15 s."),
    defect("connection-closed", "closing the connection", "One client's connection. The client connects again."),
    defect("error-not-handled", "no code handles an error", "One callback of a library. The rest goes on."),
    defect("thread-ended", "an error ended a thread", "The work of one thread. The line has its name."),
    defect("remote-read-failed", "remote read failed", "One read. The client retries."),
    defect("partition-not-judged", "a partition cannot be judged", "One partition of one fetch. The client retries."),
    defect(
        "log-start-not-recorded",
        "the broker deleted records, but the new log start was not recorded",
        "The client's DeleteRecords request: the client must try again.",
    ),
    defect(
        "topic-deletion-not-recorded",
        "a topic was not deleted, because the deletion could not be recorded",
        "The client's DeleteTopics request: the client must try again.",
    ),
    defect(
        "tier-settings-not-recorded",
        "the topic's tier settings were not recorded",
        "The client's change: the client must try again.",
    ),
)
