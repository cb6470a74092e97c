"""A slow GET gets a second one: on scripted time, against a store that answers when the test says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.segments import PARTITION
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.reader.hedged_reads import HedgedReads, HedgeSettings

SEGMENT = RemoteLogSegmentMetadata(
    RemoteLogSegmentId(PARTITION, UUID(int=1)),
    0,
    9,
    broker_id=0,
    max_timestamp_ms=0,
    event_timestamp_ms=0,
    segment_leader_epochs=(LeaderEpochEntry(0, 0),),
    segment_size_bytes=100,
    state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
)
ALWAYS = HedgeSettings(max_percent=100)


@dataclass
class Get:
    range: tuple[int, int | None]
    answer: asyncio.Future[memoryview]


class ScriptedStore:
    def __init__(self) -> None:
        self.asked: asyncio.Queue[Get] = asyncio.Queue()

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        get = Get((start_position, end_position), asyncio.get_running_loop().create_future())
        self.asked.put_nowait(get)
        return await get.answer

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return b"indexes"


class Slots:
    def __init__(self) -> None:
        self.idle = 1
        self.taken: list[int] = []

    def take_idle_slot(self, size_bytes: int) -> bool:
        if not self.idle:
            return False
        self.idle -= 1
        self.taken.append(size_bytes)
        return True

    def give_back_slot(self, size_bytes: int) -> None:
        assert self.taken.pop() == size_bytes
        self.idle += 1


class Stage:
    def __init__(self, settings: HedgeSettings = ALWAYS) -> None:
        self.store = ScriptedStore()
        self.slots = Slots()
        self.now_ms = 0
        self.pauses: asyncio.Queue[tuple[int, asyncio.Event]] = asyncio.Queue()
        self.reads = HedgedReads(self.store, self.slots, settings, lambda: self.now_ms, self._pause)

    async def _pause(self, delay_ms: int) -> None:
        over = asyncio.Event()
        self.pauses.put_nowait((delay_ms, over))
        await over.wait()

    async def read(self) -> bytes:
        return bytes(await self.reads.fetch_log_segment(SEGMENT, 5, 14))

    async def pass_delay(self) -> int:
        """Returns the duration."""
        delay_ms, over = await self.pauses.get()
        over.set()
        return delay_ms

    async def take(self, *latencies_ms: int) -> None:
        """GETs that take so long."""
        for latency_ms in latencies_ms:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.read())
                get = await self.store.asked.get()
                self.now_ms += latency_ms
                get.answer.set_result(memoryview(b""))
        while not self.pauses.empty():
            self.pauses.get_nowait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def both_gets(stage: Stage) -> tuple[Get, Get]:
    first = await stage.store.asked.get()
    await stage.pass_delay()
    second = await stage.store.asked.get()
    assert first.range == second.range == (5, 14)
    return first, second


async def hedged(stage: Stage, group: asyncio.TaskGroup) -> tuple[asyncio.Task[bytes], Get, Get]:
    reading = group.create_task(stage.read())
    return reading, *await both_gets(stage)


async def test_a_get_that_is_not_slow_stays_alone() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        (await stage.store.asked.get()).answer.set_result(memoryview(b"first"))
    assert reading.result() == b"first"
    assert stage.store.asked.empty()
    assert (stage.reads.hedged_requests, stage.reads.hedge_wins) == (0, 0)


async def test_the_second_get_wins_and_the_first_is_cancelled() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading, first, second = await hedged(stage, group)
        assert stage.slots.taken == [10]
        second.answer.set_result(memoryview(b"second"))
    assert reading.result() == b"second"
    assert first.answer.cancelled()
    assert stage.slots.taken == []
    assert (stage.reads.hedged_requests, stage.reads.hedge_wins) == (1, 1)


async def test_the_first_get_wins_and_the_second_is_cancelled() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading, first, second = await hedged(stage, group)
        first.answer.set_result(memoryview(b"first"))
    assert reading.result() == b"first"
    assert second.answer.cancelled()
    assert stage.slots.taken == []
    assert (stage.reads.hedged_requests, stage.reads.hedge_wins) == (1, 0)


@pytest.mark.parametrize("error", [RetriableRemoteStorageError("slow down"), RemoteResourceNotFoundError("where")])
@pytest.mark.parametrize("failing", [0, 1])
async def test_the_error_of_one_leaves_the_other_running(failing: int, error: RemoteStorageError) -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading, *gets = await hedged(stage, group)
        gets[failing].answer.set_exception(error)
        await settle()
        assert not reading.done()
        gets[1 - failing].answer.set_result(memoryview(b"other"))
    assert reading.result() == b"other"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_when_both_fail_the_error_of_the_first_is_raised(order: tuple[int, int]) -> None:
    stage = Stage()
    errors = [RetriableRemoteStorageError("first"), RetriableRemoteStorageError("second")]
    async with asyncio.TaskGroup() as group:
        told = group.create_task(error_of(stage))
        gets = await both_gets(stage)
        for place in order:
            gets[place].answer.set_exception(errors[place])
            await settle()
    assert told.result() is errors[0]
    assert stage.slots.taken == []


async def error_of(stage: Stage) -> Exception | None:
    try:
        await stage.read()
    except RemoteStorageError as error:
        return error
    return None


async def test_a_get_that_fails_at_once_is_not_repeated_here() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        told = group.create_task(error_of(stage))
        (await stage.store.asked.get()).answer.set_exception(RetriableRemoteStorageError("slow down"))
    assert isinstance(told.result(), RetriableRemoteStorageError)
    assert stage.store.asked.empty()


async def test_a_caller_that_gives_up_ends_both() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading, first, second = await hedged(stage, group)
        reading.cancel()
    assert reading.cancelled()
    assert first.answer.cancelled()
    assert second.answer.cancelled()
    assert stage.slots.taken == []


async def test_no_second_get_without_an_idle_slot() -> None:
    stage = Stage()
    stage.slots.idle = 0
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        first = await stage.store.asked.get()
        await stage.pass_delay()
        await settle()
        assert stage.store.asked.empty()
        first.answer.set_result(memoryview(b"first"))
    assert reading.result() == b"first"
    assert stage.reads.hedged_requests == 0


async def test_switched_off_no_get_is_watched() -> None:
    stage = Stage(HedgeSettings(max_percent=0))
    await stage.take(*[1] * 30)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        first = await stage.store.asked.get()
        await settle()
        assert stage.pauses.empty()
        first.answer.set_result(memoryview(b"first"))
    assert reading.result() == b"first"


@settings(max_examples=40, deadline=None)
@given(slow=st.lists(st.booleans(), max_size=60), percent=st.integers(1, 50))
async def test_hedges_are_never_more_than_their_part(slow: list[bool], percent: int) -> None:
    stage = Stage(HedgeSettings(max_percent=percent))
    for number, is_slow in enumerate(slow, 1):
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.read())
            first = await stage.store.asked.get()
            before = stage.reads.hedged_requests
            if is_slow:
                await stage.pass_delay()
                await settle()
            first.answer.set_result(memoryview(b""))
        assert stage.reads.hedged_requests - before <= is_slow
        assert stage.reads.hedged_requests * 100 <= number * percent
        while not stage.store.asked.empty():
            stage.store.asked.get_nowait()
        while not stage.pauses.empty():
            stage.pauses.get_nowait()
    if all(slow):
        assert stage.reads.hedged_requests == len(slow) * percent // 100


async def test_calm_times_save_up_only_a_few_hedges() -> None:
    stage = Stage(HedgeSettings(max_percent=50))
    await stage.take(*[1] * 100)
    for _ in range(24):
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.read())
            first = await stage.store.asked.get()
            await stage.pass_delay()
            await settle()
            first.answer.set_result(memoryview(b""))
        while not stage.store.asked.empty():
            stage.store.asked.get_nowait()
    assert stage.reads.hedged_requests == 21


async def test_slow_is_what_takes_longer_than_almost_all_others() -> None:
    stage = Stage()
    assert stage.reads.delay_ms == 2_000
    await stage.take(*range(101, 120))
    assert stage.reads.delay_ms == 2_000
    await stage.take(*range(120, 201))
    assert stage.reads.delay_ms == 196
    await stage.take(*[3] * 128)
    assert stage.reads.delay_ms == 50
    await stage.take(*[60_000] * 10)
    assert stage.reads.delay_ms == 2_000


async def test_a_get_that_was_hedged_still_counts_as_slow() -> None:
    """Otherwise the limit would sink with every hedge."""
    stage = Stage()
    await stage.take(*[100] * 128)
    for _ in range(7):
        async with asyncio.TaskGroup() as group:
            _, _, second = await hedged(stage, group)
            stage.now_ms += 250
            second.answer.set_result(memoryview(b""))
    assert stage.reads.delay_ms == 250
