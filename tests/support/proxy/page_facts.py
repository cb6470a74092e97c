"""`ScriptedFacts`: a `FactSource` with a tier of any size, for tests of the page and of the API."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from proxy.admin.facts import (
    BrokerFacts,
    ClusterFacts,
    ErrorLine,
    ErrorsPage,
    EventLine,
    GapFacts,
    HistoryFacts,
    Outage,
    Overview,
    OwnerFacts,
    PartitionLine,
    PartitionPage,
    ProcessFacts,
    ProcessState,
    RaisedAlarm,
    ReaderLine,
    ReadersPage,
    SegmentFacts,
    SegmentSpan,
    Series,
    SettingLine,
    SettingsPage,
    StoreFacts,
    TierBytes,
    TopicLine,
    TopicPage,
    TopicQuery,
    TopicSetting,
    TopicsPage,
    WaitingRead,
    WhyFacts,
)
from proxy.admin.lines import topic_line
from proxy.admin.topic_list import TOPICS_PER_PAGE, matching, page_count, page_of, summed
from tiers.errors import Peer
from tiers.explain.answers import Question, Why
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.tasks.partition_tasks import StageReport

NOW_MS = 1_790_000_000_000
DAY_MS = 86_400_000
MIB = 1 << 20
VARIABLE = "TIDEGATE__UPSTREAM__SASL__PASSWORD"
SETTINGS = (
    TopicSetting("remote.storage.enable", "true", "file"),
    TopicSetting("local.retention.ms", "21600000", "file"),
    TopicSetting("local.retention.bytes", "-2", "default"),
    TopicSetting("remote.log.copy.disable", "false", "default"),
    TopicSetting("remote.log.delete.on.disable", "false", "default"),
    TopicSetting("remote.log.retention.minutes", "-2", "default"),
    TopicSetting("remote.log.retention.bytes", "-2", "default"),
    TopicSetting("cleanup.policy", "delete", "broker"),
    TopicSetting("retention.ms", "7776000000", "topic"),
    TopicSetting("retention.bytes", "-1", "broker"),
)


def whys_of(line: PartitionLine) -> tuple[WhyFacts, ...]:
    """Returns an answer to each question about a partition of `partition_line`."""
    end, local_start = (line.remote_end or 0) + 1, line.local_start or 0
    rule = "docs/design.md, 'Log range'"
    return (
        WhyFacts(f"offsets {local_start} to {local_start + 65_535}", 1, Why(
            Question("still on the broker"), "local-retention", rule,
            "The local retention covers the segment. The owner may trim it when its newest record is 6 h old "
            "(local.retention.ms = 21600000, from the file); it is 2 h 5 min old now.",
            NOW_MS + 14_100_000,
        )),
        WhyFacts(f"offsets {end} to {(line.high_watermark or 0) - 1}", 0, Why(
            Question("not yet remote"), "not-due", rule,
            "The owner copies records when they have segment.bytes (67108864), or when the oldest one is segment.ms "
            "old (1 h). These are still too few and too new.",
            NOW_MS + 2_846_000,
        )),
        WhyFacts("offsets 0 to 65535", line.segments - 1, Why(
            Question("not yet expired"), "total-retention", rule,
            "The total retention covers the segment. It expires when its newest record is 90 d old (retention.ms = "
            "7776000000); it is 13 d old now.",
            NOW_MS + 77 * DAY_MS,
        )),
    )  # fmt: skip


def partition_line(topic: str, number: int, size: int) -> PartitionLine:
    """Returns a partition whose records have 1 KiB each. `size` is the number of remote segments."""
    remote_end = size * 65_536 - 1
    local_start = remote_end + 1 - min(2, size) * 65_536
    backlog = 9_000 + 977 * (size % 7)
    return PartitionLine(
        topic=topic,
        partition=number,
        leader=1 + number % 3,
        is_owned=number % 2 == 0,
        metadata_partition=number % 50,
        log_start_offset=0,
        remote_start=0,
        remote_end=remote_end,
        local_start=local_start,
        last_stable_offset=remote_end + 1 + backlog,
        high_watermark=remote_end + 1 + backlog + 512,
        leader_epoch=4,
        bytes=TierBytes((size - min(2, size)) * 64 * MIB, min(2, size) * 64 * MIB, backlog * 1024),
        segments=size,
        oldest_ms=NOW_MS - size * DAY_MS // 4,
        newest_remote_ms=NOW_MS - 1_500_000,
        backlog_offsets=backlog,
        backlog_bytes=backlog * 1024,
        backlog_ms=754_000,
    )


def many_topics(count: int) -> dict[str, tuple[TopicLine, list[PartitionLine]]]:
    areas = ("orders", "payments", "clicks", "audit", "inventory", "shipping", "sensors")
    found = {}
    for number in range(count):
        name = f"{areas[number % len(areas)]}-{number:04}"
        lines = [partition_line(name, each, 3 + (number * 7 + each * 3) % 90) for each in range(1 + number % 12)]
        line = topic_line(name, f"00000000-0000-0000-0000-{number:012}", "tiered", lines)
        found[name] = replace(line, settings=SETTINGS), lines
    return found


@dataclass
class ScriptedFacts:
    """Implements `FactSource`. A test changes the fields."""

    topic_lines: dict[str, tuple[TopicLine, list[PartitionLine]]] = field(default_factory=lambda: many_topics(12))
    gone_broker: bool = False
    dead_store: bool = False
    readers_seen: tuple[ReaderLine, ...] = ()
    waiting: tuple[WaitingRead, ...] = ()
    incidents: tuple[ErrorLine, ...] = ()
    events: tuple[EventLine, ...] = ()

    async def topics(self, query: TopicQuery) -> TopicsPage:
        lines = [line for line, _ in self.topic_lines.values()]
        found = matching(lines, query)
        return TopicsPage(
            as_of_ms=NOW_MS,
            query=query,
            total=len(lines),
            matching=len(found),
            partitions=sum(line.partitions for line in lines),
            pages=page_count(len(found), TOPICS_PER_PAGE),
            bytes=summed(lines),
            topics=tuple(page_of(found, query.page, TOPICS_PER_PAGE)),
        )

    async def topic(self, name: str, page: int) -> TopicPage | None:
        known = self.topic_lines.get(name)
        return None if known is None else TopicPage(NOW_MS, known[0], page, 1, tuple(known[1]))

    async def partition(self, name: str, number: int, from_offset: int) -> PartitionPage | None:
        known = self.topic_lines.get(name)
        if known is None or number >= len(known[1]):
            return None
        line = known[1][number]
        segments = tuple(
            SegmentFacts(
                id=f"00000000-0000-0000-0000-{each:012}",
                start_offset=each * 65_536,
                end_offset=each * 65_536 + 65_535,
                valid_end_offset=each * 65_536 + 65_535,
                size_bytes=64 * MIB,
                state="copying" if each == line.segments else "remote",
                is_on_broker=each * 65_536 >= (line.local_start or 0),
                max_timestamp_ms=NOW_MS - (line.segments - each) * DAY_MS // 4,
                event_timestamp_ms=NOW_MS - (line.segments - each) * DAY_MS // 4 + 4_000,
                epochs=(LeaderEpochEntry(4, 0),),
            )
            for each in range(line.segments)
        )
        failing = StageReport("copy", 7, "the store does not answer: connection refused", is_running=False)
        return PartitionPage(
            as_of_ms=NOW_MS,
            line=line,
            state="tiered",
            from_offset=from_offset,
            next_from_offset=None,
            segments=tuple(each for each in segments if each.end_offset >= from_offset),
            shape=tuple(SegmentSpan(each.start_offset, each.end_offset + 1, each.state, 1) for each in segments),
            gaps=(GapFacts(65_536 * 2 + 100, 65_536 * 2 + 900),) if line.gaps else (),
            stages=(
                StageReport("survey", 0, "", is_running=True),
                failing if self.dead_store else StageReport("copy", 0, "", is_running=False),
                StageReport("expiry", 0, "", is_running=False),
                StageReport("trim", 0, "", is_running=False),
            ),
            settings=SETTINGS,
            whys=whys_of(line),
        )

    async def overview(self) -> Overview:
        lines = [line for line, _ in self.topic_lines.values()]
        partitions = sum(line.partitions for line in lines)
        outages: tuple[Outage, ...] = ()
        if self.dead_store:
            following = (
                RaisedAlarm("unfit", "remote-log", "store: connection refused"),
                RaisedAlarm("copy-stalled", "orders-0000, 3 partitions", "orders-0000-1: connection refused"),
            )
            what, since_ms = "store s3 at https://s3.example.org", NOW_MS - 300_000
            outages = (
                Outage(Peer.STORE, "store-failing", what, "connection refused", since_ms, 2, since_ms, 3, following),
            )
        brokers = tuple(
            BrokerFacts(
                node_id, f"kafka-{node_id}.example.org", 9092, f"zone-{node_id}", partitions // 3, node_id == 1,
                NOW_MS - 90_000 if self.gone_broker and node_id == 3 else None,
            )
            for node_id in (1, 2, 3)
        )  # fmt: skip
        return Overview(
            as_of_ms=NOW_MS,
            version="0.1.0",
            is_tiered=True,
            cluster=ClusterFacts(
                cluster_id="4L6g3nShT-eMCtK--X86sw",
                brokers=brokers,
                trouble=None,
                owners=(
                    OwnerFacts("tidegate-9d1f", "10.1.0.4", tuple(range(25)), partitions // 2, is_this=True),
                    OwnerFacts("tidegate-c07a", "10.1.0.5", tuple(range(25, 50)), partitions // 2, is_this=False),
                ),
                topics=len(lines),
                partitions=partitions,
                bytes=summed(lines),
                metadata_alarm=None,
                metadata_age_ms=120,
                alarms=(),
            ),
            stores=(
                StoreFacts("s3", 184_213, 412, 4, 410)
                if self.dead_store
                else StoreFacts("s3", 184_213, 3, 4, 0, 18.2, 96.0),
            ),
            processes=(
                ProcessFacts("worker-1", 4211, ProcessState.SERVING, (), 0, 91 * MIB, 212),
                ProcessFacts("worker-2", 4212, ProcessState.SERVING, (), 0, 88 * MIB, 198),
                ProcessFacts("remote-log", 4213, ProcessState.SERVING, (), 1, 140 * MIB, None),
                ProcessFacts("remote-reader", 4214, ProcessState.SERVING, (), 0, 320 * MIB, None),
            ),
            alarms=(),
            history=history(),
            outages=outages,
            waiting_clients=2 if self.dead_store else 0,
            events=self.events,
        )  # fmt: skip

    async def readers(self) -> ReadersPage:
        return ReadersPage(NOW_MS, 100, self.readers_seen, self.waiting)

    async def settings(self) -> SettingsPage:
        return SettingsPage(
            (
                SettingLine("", "workers", "2", "file", "TIDEGATE__WORKERS", "The number of processes."),
                SettingLine("upstream.sasl", "password", "••••••", "environment", VARIABLE, ""),
                SettingLine("limits", "max.connections", "10000", "default", "TIDEGATE__LIMITS__MAX_CONNECTIONS", ""),
            )
        )  # fmt: skip

    async def errors(self) -> ErrorsPage:
        return ErrorsPage(self.incidents)


def history(samples: int = 240) -> HistoryFacts:
    """Returns an hour with a wave in it, in which the remote tier was read for a while."""

    def wave(low: float, high: float, turns: float) -> tuple[float | None, ...]:
        return tuple(
            low + (high - low) * (0.5 + 0.5 * math.sin(turns * 2 * math.pi * each / samples + turns) ** 3)
            for each in range(samples)
        )

    def part(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return tuple(value if samples // 3 < place < samples * 3 // 4 else None for place, value in enumerate(values))

    return HistoryFacts(
        15_000,
        tuple(NOW_MS - 15_000 * each for each in range(samples, 0, -1)),
        (
            Series("local_p50", "ms", wave(0.6, 0.9, 3)),
            Series("local_p99", "ms", wave(2.1, 4.8, 5)),
            Series("remote_p50", "ms", part(wave(12, 21, 3))),
            Series("remote_p99", "ms", part(wave(60, 130, 7))),
            Series("local_bytes", "B/s", wave(60e6, 90e6, 2)),
            Series("remote_bytes", "B/s", tuple(value or 0.0 for value in part(wave(20e6, 70e6, 4)))),
            Series("copied_bytes", "B/s", wave(18e6, 26e6, 6)),
            Series("backlog", "B", wave(200e6, 900e6, 2)),
            Series("cache_hits", "%", part(wave(70, 99, 3))),
        ),
    )


class NoPages:
    """Implements `AdminPages` with no metrics, for a process without a problem."""

    async def metrics(self) -> bytes:
        return b""

    async def not_serving(self) -> list[str]:
        return []

    async def not_ready(self) -> list[str]:
        return []
