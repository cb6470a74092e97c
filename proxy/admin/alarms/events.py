"""The alarms that are events, in words: what has happened."""

from __future__ import annotations

from typing import Final

from proxy.admin.alarm import Alarm, Kind
from proxy.log_events import DEFECT

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
        "open-files",
        Kind.EVENT,
        (
            "clients' connections cannot be accepted, trying again",
            "connections to the admin port cannot be accepted, trying again",
            "a process of the proxy cannot connect, trying again",
            "a message between two processes of the proxy was cut",
        ),
        "A process has no file descriptor left.",
        "New connections of clients, of the admin port or of the proxy's own processes wait. A read whose message was"
        " cut is asked again, at the latest after its deadline.",
        "Raise the limit of open files, or lower `max.connections`.",
        heading="a process has no file descriptor left",
    ),
    Alarm(
        "spool-damaged",
        Kind.EVENT,
        (
            "the spool has damaged a segment whose copy has not ended",
            "a segment in the spool cannot be read",
        ),
        "The disk changed the files of a segment whose copy had failed, or a later release wrote them.",
        "Nothing. Files that cannot be read stay in the spool. If the broker has removed the records meanwhile, they"
        " are lost, and leave a gap.",
        "Check the disk. For files of a later release, start that release on this machine.",
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
    Alarm(
        DEFECT,
        Kind.EVENT,
        (
            "a read for another process failed",
            "internal error",
            "the remote log manager failed",
            "the tiered topics could not be read",
            "work of the remote log manager failed",
            "a stage of a partition failed",
            "the tier could not be looked at",
            "the history of the page has a hole",
            "closing the connection",
            "no code handles an error",
            "an error ended a thread",
            "remote read failed",
            "a partition cannot be judged",
            "the broker deleted records, but the new log start was not recorded",
            "a topic was not deleted, because the deletion could not be recorded",
            "the topic's tier settings were not recorded",
        ),
        "The line has a traceback. It is a defect of Tidegate or of a storage manager.",
        "One read, one connection, one request or one round, which is tried again. `internal error` ends the process,"
        " and the supervisor restarts it. After `the remote log manager failed` nothing is copied until a restart.",
        "Please report it with the traceback.",
        heading="a defect",
    ),
)
