"""The facts that the page shows and that the API answers, as frozen values. They say nothing about their form.

Times are milliseconds of the wall clock, sizes are bytes. `remote_end` is inclusive, as Ry in docs/founding.md; every
other end is a next offset. None stands for a fact that this process does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from tiers.errors import Peer
from tiers.explain.answers import Why
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.tasks.partition_tasks import StageReport

SettingSource = Literal["topic", "file", "environment", "broker", "default"]
BROKERS: Final = "the brokers"
THIS_PROCESS: Final = "this process"
"""What an alarm about a process concerns, where that process itself says it."""
TopicState = Literal["tiered", "paused", "refused", "missing", "deleted"]
SegmentState = Literal["copying", "remote", "cut", "void", "deleting"]


class ProcessState(StrEnum):
    """What a process does for clients now."""

    INITIALIZING = "INITIALIZING"
    """It starts: it opens the remote tier, or has not read the cluster yet."""
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    """It accepts no more clients, and answers the requests in progress."""
    FAILED = "FAILED"
    """The brokers reject the proxy, or the process died and is about to be restarted."""


@dataclass(frozen=True, slots=True)
class TierBytes:
    """The bytes of a log by the tier that has them. The bytes outside the remote tier are estimates."""

    remote_only: int = 0
    both: int = 0
    local_only: int = 0

    @property
    def total(self) -> int:
        return self.remote_only + self.both + self.local_only


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """An alarm that is raised now. `name` is its name in docs/alarms.md, `about` what it concerns.

    `waits_for`: who does not answer, if that is why the alarm is raised."""

    name: str
    about: str
    detail: str = ""
    process: str = ""
    since_ms: int | None = None
    waits_for: Peer | None = None


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A client that gets no records of a partition from the remote tier: its last requests had none.

    `since_ms` is the time of the first of these requests, and `offset` that of the last."""

    client_id: str
    topic: str
    partition: int
    offset: int
    since_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outage:
    """A store or a broker that does not answer, which is the root cause of other alarms.

    `what` names it, `alarm` is its name in docs/alarms.md. `clients` wait for records since `clients_since_ms`, and
    the copying of `partitions` waits."""

    peer: Peer
    alarm: str
    what: str
    reason: str
    since_ms: int | None
    clients: int = 0
    clients_since_ms: int | None = None
    partitions: int = 0
    consequences: tuple[RaisedAlarm, ...] = ()
    """The alarms that end when the outage ends."""


@dataclass(frozen=True, slots=True)
class EventLine:
    """A line of the log with the level ERROR. `runbook` is its page in docs/runbook, `detail` what it is about."""

    time_ms: int
    runbook: str
    message: str
    detail: str = ""
    process: str = ""


@dataclass(frozen=True, slots=True)
class PartitionLine:
    """A partition, without its segments."""

    topic: str
    partition: int
    leader: int | None = None
    is_owned: bool = False
    """Whether this proxy owns the partition."""
    metadata_partition: int | None = None
    log_start_offset: int | None = None
    remote_start: int | None = None
    remote_end: int | None = None
    local_start: int | None = None
    last_stable_offset: int | None = None
    high_watermark: int | None = None
    leader_epoch: int | None = None
    bytes: TierBytes = TierBytes()
    segments: int = 0
    cut_segments: int = 0
    cut_bytes: int = 0
    gaps: int = 0
    oldest_ms: int | None = None
    """The newest timestamp in the first readable remote segment. The log may begin a little earlier."""
    newest_remote_ms: int | None = None
    backlog_offsets: int | None = None
    backlog_bytes: int | None = None
    backlog_ms: int | None = None
    """How long a record has waited for its copy, as the owner knows it."""
    alarms: tuple[str, ...] = ()
    trouble: str | None = None
    """Why the leader did not answer."""


@dataclass(frozen=True, slots=True)
class TopicSetting:
    key: str
    value: str
    source: SettingSource


@dataclass(frozen=True, slots=True)
class TopicLine:
    """A topic that is tiered, that should be, or that was."""

    topic: str
    topic_id: str
    state: TopicState
    reason: str = ""
    """Why the topic is not tiered."""
    partitions: int = 0
    bytes: TierBytes = TierBytes()
    segments: int = 0
    cut_segments: int = 0
    gaps: int = 0
    oldest_ms: int | None = None
    newest_remote_ms: int | None = None
    backlog_bytes: int | None = None
    backlog_ms: int | None = None
    alarms: tuple[str, ...] = ()
    unanswered: int = 0
    """The partitions whose leader did not answer."""
    settings: tuple[TopicSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicQuery:
    """What a reader asks of the list of topics. `search` is part of a name. The first page is 1."""

    search: str = ""
    state: TopicState | Literal[""] = ""
    sort: Literal["name", "size", "backlog", "age", "alarms"] = "name"
    descending: bool = False
    page: int = 1


@dataclass(frozen=True, slots=True)
class TopicsPage:
    """One page of the list of topics. `total` counts all topics, `matching` those of the query."""

    as_of_ms: int
    query: TopicQuery
    total: int
    matching: int
    partitions: int
    pages: int
    bytes: TierBytes
    topics: tuple[TopicLine, ...]


@dataclass(frozen=True, slots=True)
class TopicPage:
    """A topic with one page of its partitions."""

    as_of_ms: int
    topic: TopicLine
    page: int
    pages: int
    partitions: tuple[PartitionLine, ...]


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A remote segment. `end_offset` and `valid_end_offset` are inclusive."""

    id: str
    start_offset: int
    end_offset: int
    valid_end_offset: int
    size_bytes: int
    state: SegmentState
    is_on_broker: bool | None
    """Whether the broker still has records of the segment."""
    max_timestamp_ms: int
    event_timestamp_ms: int
    epochs: tuple[LeaderEpochEntry, ...]


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """Neighbouring segments of one state, joined for a drawing. `end` is a next offset."""

    start: int
    end: int
    state: SegmentState
    segments: int


@dataclass(frozen=True, slots=True)
class GapFacts:
    """A gap: the brokers removed [`first_offset`, `next_offset`) before they were copied."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class WhyFacts:
    """Why a segment is still on the broker, not yet remote or not yet expired.

    `about` names the oldest offsets with this reason, and `more` counts the other segments with it."""

    about: str
    more: int
    why: Why


@dataclass(frozen=True, slots=True)
class PartitionPage:
    """A partition with a window of its segments, the first of which ends at or above `from_offset`."""

    as_of_ms: int
    line: PartitionLine
    state: TopicState
    from_offset: int
    next_from_offset: int | None
    segments: tuple[SegmentFacts, ...]
    shape: tuple[SegmentSpan, ...]
    """All segments, as many neighbours joined as a drawing needs."""
    gaps: tuple[GapFacts, ...]
    stages: tuple[StageReport, ...]
    settings: tuple[TopicSetting, ...]
    notes: tuple[str, ...] = ()
    """Sentences about the whole partition: a stop, a pause, a stage that fails."""
    whys: tuple[WhyFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """A broker of the cluster. `gone_since_ms` is set if the cluster named it earlier, and does not any more."""

    node_id: int
    host: str
    port: int
    rack: str | None
    leads: int
    """The partitions of all topics that it leads."""
    is_controller: bool
    gone_since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """A member of the owners' group."""

    member: str
    """Its id; empty: not known."""
    host: str
    metadata_partitions: tuple[int, ...]
    partitions: int
    """The tiered partitions that it owns."""
    is_this: bool


@dataclass(frozen=True, slots=True)
class PausedTopic:
    """A topic on whose remote tier some work does not go on, by an operator's command or by the settings."""

    topic: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What the process that keeps the metadata knows about the cluster."""

    cluster_id: str
    brokers: tuple[BrokerFacts, ...]
    trouble: str | None
    owners: tuple[OwnerFacts, ...]
    topics: int
    partitions: int
    bytes: TierBytes
    metadata_alarm: str | None
    metadata_age_ms: int | None
    alarms: tuple[RaisedAlarm, ...]
    waiting_for_store: int = 0
    """The partitions of this proxy whose copy waits for a store that does not answer."""
    waiting_for_brokers: int = 0
    paused_topics: int = 0
    paused: tuple[PausedTopic, ...] = ()
    """The first of the paused topics, by name."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store as the processes of this proxy use it. Latencies are those of the last minutes."""

    store: str
    requests: int
    errors: int
    in_flight: int
    recent_errors: int = 0
    read_p50_ms: float | None = None
    read_p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process of this proxy. `reasons` say why it does not serve."""

    name: str
    pid: int | None
    state: ProcessState
    reasons: tuple[str, ...]
    restarts: int
    rss_bytes: int | None
    connections: int | None


@dataclass(frozen=True, slots=True)
class Series:
    """A sparkline: one value for each of the times of the history. None: no value, for example no read."""

    name: str
    unit: Literal["ms", "B/s", "B", "%"]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    interval_ms: int
    times_ms: tuple[int, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    as_of_ms: int
    version: str
    is_tiered: bool
    cluster: ClusterFacts | None
    stores: tuple[StoreFacts, ...]
    processes: tuple[ProcessFacts, ...]
    alarms: tuple[RaisedAlarm, ...]
    """Those that follow from no outage."""
    history: HistoryFacts
    outages: tuple[Outage, ...] = ()
    waiting_clients: int = 0
    events: tuple[EventLine, ...] = ()
    """The last alarms of the log, the newest first: also those that have no state, and those that have ended."""


@dataclass(frozen=True, slots=True)
class ReaderLine:
    """The reads of one client id from one topic of the remote tier, since the process started."""

    client_id: str
    topic: str
    bytes: int
    bytes_per_second: float
    """Over the last minute."""
    reads: int
    throttled: int
    """The reads that a quota answered empty."""
    cache_hits: int
    """The reads whose first records were in memory."""
    last_ms: int


@dataclass(frozen=True, slots=True)
class ReadersPage:
    as_of_ms: int
    max_clients: int
    readers: tuple[ReaderLine, ...]
    waiting: tuple[WaitingRead, ...] = ()
    """The clients that get no records, the longest wait first."""


@dataclass(frozen=True, slots=True)
class SettingLine:
    """A setting. `variable` is the environment variable that sets it."""

    section: str
    key: str
    value: str
    source: SettingSource
    variable: str
    description: str


@dataclass(frozen=True, slots=True)
class SettingsPage:
    settings: tuple[SettingLine, ...]


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """An undecodable frame, or a connection that was closed, refused or throttled.

    `process` is empty in the answer of that process itself."""

    time_ms: int
    kind: str
    reason: str
    process: str = ""
    peer: str | None = None
    node_id: int | None = None
    client_id: str | None = None
    sender: str | None = None
    api: str | None = None
    api_version: int | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorsPage:
    errors: tuple[ErrorLine, ...] = field(default=())
