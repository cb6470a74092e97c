"""What one process answers, and the history that it keeps."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import pytest

from proxy.admin.counts import ProcessReport
from proxy.admin.facts import THIS_PROCESS, EventLine, ProcessState, RaisedAlarm, TopicQuery
from proxy.admin.sampling import sampled
from proxy.admin.source import FactsUnavailableError, OwnFacts, OwnParts, raised
from proxy.wire.error_log import ErrorLog
from tests.support.proxy.parsed_config import parse_config
from tiers.reader.read_accounts import ReadAccounts
from tiers.tasks.alarms import ActiveAlarm, AlarmReason

TIERED = """
[upstream]
bootstrap.servers = "a:1"
[storage]
implementation = "local"
path = "/tier"
[[topics]]
name = "orders"
"""


@dataclass
class Process:
    parts: OwnParts = field(default_factory=OwnParts)
    state: ProcessState = ProcessState.INITIALIZING
    reasons: list[str] = field(default_factory=list)
    log: ErrorLog = field(default_factory=lambda: ErrorLog(wall_clock_ms=lambda: 5))
    now_ms: int = 1_000

    def facts(self, text: str = TIERED) -> OwnFacts:
        return OwnFacts(
            "tidegate",
            parse_config(text),
            "1.0",
            self.parts,
            lambda: self.state,
            lambda: self.reasons,
            lambda: self.log.incidents,
            (),
            clock_ms=lambda: self.now_ms,
            wall_clock_ms=lambda: 1_000_000 + self.now_ms,
        )


async def test_a_process_without_an_open_tier_says_so() -> None:
    facts = Process().facts()
    for ask in (facts.topics(TopicQuery()), facts.topic("orders", 1), facts.partition("orders", 0, 0), facts.readers()):
        with pytest.raises(FactsUnavailableError, match="the remote tier is not open yet"):
            await ask
    untiered = Process().facts('[upstream]\nbootstrap.servers = "a:1"\n')
    with pytest.raises(FactsUnavailableError, match="the settings tier no topics"):
        await untiered.topics(TopicQuery())
    overview = await untiered.overview()
    assert (overview.cluster, overview.is_tiered) == (None, False)


async def test_readers_are_sorted_by_what_they_read_now() -> None:
    process = Process()
    accounts = process.parts.accounts = ReadAccounts(lambda: process.now_ms)
    accounts.note_read("past", "orders", 9_000, is_cache_hit=False)
    process.now_ms += 120_000
    accounts.note_read("now", "orders", 600, is_cache_hit=True)
    process.now_ms += 1_000
    lines = (await process.facts().readers()).readers
    assert [(each.client_id, each.bytes_per_second) for each in lines] == [("now", 10.0), ("past", 0.0)]
    assert lines[0].last_ms == 1_000_000 + process.now_ms - 1_000


async def test_the_overview_has_the_process_and_why_it_is_not_ready() -> None:
    process = Process(reasons=["the proxy has not read the cluster yet"])
    process.parts.report = lambda: ProcessReport(os.getpid(), rss_bytes=7, connections=3)
    facts = process.facts()
    (shown,) = (await facts.overview()).processes
    assert (shown.state, shown.reasons) == ("INITIALIZING", ("the proxy has not read the cluster yet",))
    assert (shown.pid, shown.rss_bytes, shown.connections) == (os.getpid(), 7, 3)
    process.state = ProcessState.SERVING
    (shown,) = (await facts.overview()).processes
    assert (shown.state, len(shown.reasons)) == ("SERVING", 1), "an alarm does not end the service"


async def test_the_overview_has_the_alarms_and_events_of_the_process() -> None:
    process = Process()
    rejected = RaisedAlarm("proxy-rejected", THIS_PROCESS, "the password is wrong")
    event = EventLine(1_000, "gap", "the broker removed records before they were copied", "partition orders-0")
    process.parts.report = lambda: ProcessReport(os.getpid(), alarms=(rejected,), events=(event,))
    overview = await process.facts().overview()
    assert (overview.alarms, overview.events) == ((rejected,), (event,))


async def test_errors_are_those_of_the_ring() -> None:
    process = Process()
    process.log.note("refused", "max.connections is reached", peer="10.0.0.1:5", client_id="app")
    (error,) = (await process.facts().errors()).errors
    assert (error.kind, error.reason, error.peer, error.client_id, error.time_ms) == (
        "refused", "max.connections is reached", "10.0.0.1:5", "app", 5,
    )  # fmt: skip


def test_alarms_of_a_topic_are_one_alarm() -> None:
    found = raised(
        [
            ActiveAlarm("orders", AlarmReason.COPY_STALLED, "orders-1", "refused"),
            ActiveAlarm("audit", AlarmReason.STAGE_FAILING, "audit-0 copy", "refused"),
            ActiveAlarm("audit", AlarmReason.STAGE_FAILING, "audit-0 trim", "refused"),
            ActiveAlarm("audit", AlarmReason.STUCK_LSO, "audit-0", ""),
            ActiveAlarm("orders", AlarmReason.COPY_STALLED, "orders-2", "refused"),
            ActiveAlarm("orders", AlarmReason.RETENTION_DIFFERS, "", "7 d, not 5 d"),
        ]
    )
    assert found == [
        RaisedAlarm("copy-stalled", "orders, 2 partitions", "orders-1: refused"),
        RaisedAlarm("retention-differs", "orders", "7 d, not 5 d"),
        RaisedAlarm("stage-failing", "audit", "audit-0 copy: refused"),
        RaisedAlarm("stuck-lso", "audit", "audit-0"),
    ]


async def test_a_sample_is_taken_at_once_and_then_at_every_interval() -> None:
    taken = asyncio.Queue[int]()
    pauses: list[float] = []

    async def sample() -> None:
        taken.put_nowait(len(pauses))
        if len(pauses) == 1:
            raise RuntimeError("a defect")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async with sampled(sample, 15_000, sleep):
        assert [await taken.get() for _ in range(3)] == [0, 1, 2]
    assert set(pauses) == {15.0}
