"""`tidegate tier accept` finds nothing to accept only if the metadata, the store and the leader agree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.tasks.history.acceptance import may_be_in_doubt
from tiers.tasks.history.stored_facts import read_stored_facts

Damage = Callable[[CommandBench, InMemoryLog], Awaitable[None]]


async def is_needed(bench: CommandBench, log: InMemoryLog, log_start: int = 0) -> bool:
    """Two segments of ten records are remote, and the log has 30 records."""
    bounds = await log.bounds(PARTITION, 1)
    stored = await read_stored_facts(bench.storage, CLUSTER_ID, PARTITION)
    return await may_be_in_doubt(bench.rlmm.log, bounds, log_start, stored, 1)


@pytest.fixture
async def log(bench: CommandBench) -> InMemoryLog:
    made = InMemoryLog(b"".join(batch_of(start, 10) for start in (0, 10, 20)), log_start_offset=15)
    await bench.tiered(0)
    await bench.tiered(10)
    await bench.rlmm.put_local_log_start(PARTITION, OffsetAndEpoch(15, 0))
    await bench.put_facts()
    return made


async def test_a_healthy_partition_needs_none(bench: CommandBench, log: InMemoryLog) -> None:
    assert not await is_needed(bench, log)


async def test_a_recorded_gap_needs_none(bench: CommandBench, log: InMemoryLog) -> None:
    log.log_start_offset = 25
    await bench.rlmm.put_log_gap(PARTITION, LogGap(20, 25), 0)
    assert not await is_needed(bench, log)


async def test_deleted_records_need_none(bench: CommandBench, log: InMemoryLog) -> None:
    log.log_start_offset = 25
    await bench.rlmm.put_log_start(PARTITION, LogStart(25, 0, LogStartReason.USER))
    assert not await is_needed(bench, log, 25)


async def test_a_partition_without_a_tier_needs_none(bench: CommandBench) -> None:
    log = InMemoryLog(batch_of(20, 10), log_start_offset=20)
    assert not await is_needed(bench, log)


async def gap(bench: CommandBench, log: InMemoryLog) -> None:
    log.log_start_offset = 25


async def forgotten_segment(bench: CommandBench, log: InMemoryLog) -> None:
    del bench.rlmm.segments[(await bench.tiered(20)).segment_id]


async def lost_position(bench: CommandBench, log: InMemoryLog) -> None:
    bench.rlmm.is_position_confirmed = False


@pytest.mark.parametrize(
    "damage",
    [
        gap,
        forgotten_segment,
        lost_position,
    ],
    ids=lambda damage: damage.__name__,
)
async def test_a_reason_to_doubt_is_found(bench: CommandBench, log: InMemoryLog, damage: Damage) -> None:
    await damage(bench, log)
    assert await is_needed(bench, log)
