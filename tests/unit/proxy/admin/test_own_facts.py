"""What one process answers to the supervisor."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from proxy.admin.facts import RaisedAlarm, TopicQuery
from proxy.admin.sampling import sampled
from proxy.admin.source import FactsUnavailableError, OwnFacts, OwnParts, raised
from proxy.wire.error_log import ErrorLog
from tiers.reader.read_accounts import ReadAccounts
from tiers.tasks.alarms import ActiveAlarm, AlarmReason


@dataclass
class Process:
    parts: OwnParts = field(default_factory=OwnParts)
    log: ErrorLog = field(default_factory=lambda: ErrorLog(wall_clock_ms=lambda: 5))
    now_ms: int = 1_000

    def facts(self) -> OwnFacts:
        return OwnFacts(
            self.parts,
            lambda: self.log.incidents,
            clock_ms=lambda: self.now_ms,
            wall_clock_ms=lambda: 1_000_000 + self.now_ms,
        )


async def test_a_process_without_an_open_tier_says_so() -> None:
    facts = Process().facts()
    asked = facts.topics(TopicQuery()), facts.topic("orders", 1), facts.partition("orders", 0, 0), facts.readers()
    for ask in (*asked, facts.cluster()):
        with pytest.raises(FactsUnavailableError, match="the remote tier is not open yet"):
            await ask


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
