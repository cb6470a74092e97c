"""A slow GET gets a second one: on scripted time, against a store that answers when the test says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.local_indexes import segment_object
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.hedged_reads import HedgedReads, HedgeSettings

SEGMENT, _ = segment_object(0)
FIRST, SECOND = RetriableRemoteStorageError("first"), RemoteResourceNotFoundError("second")


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


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Stage:
    def __init__(self, max_percent: int = 100) -> None:
        self.store = ScriptedStore()
        self.slots = Slots()
        self.now_ms = 0
        self.pauses: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        settings = HedgeSettings(max_percent=max_percent)
        self.reads = HedgedReads(self.store, self.slots, settings, lambda: self.now_ms, self._pause)

    async def _pause(self, delay_ms: int) -> None:
        over = asyncio.Event()
        self.pauses.put_nowait(over)
        await over.wait()

    async def read(self) -> bytes | RemoteStorageError:
        """Returns the bytes, or the error."""
        try:
            return bytes(await self.reads.fetch_log_segment(SEGMENT, 5, 14))
        except RemoteStorageError as error:
            return error

    async def pass_delay(self) -> None:
        (await self.pauses.get()).set()
        await settle()

    async def both_gets(self) -> tuple[Get, Get]:
        first = await self.store.asked.get()
        await self.pass_delay()
        second = await self.store.asked.get()
        assert first.range == second.range == (5, 14)
        return first, second

    async def take(self, *latencies_ms: int, is_slow: bool = False) -> None:
        """GETs that take so long. If they are slow, the time for a second GET comes."""
        for latency_ms in latencies_ms:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.read())
                get = await self.store.asked.get()
                if is_slow:
                    await self.pass_delay()
                self.now_ms += latency_ms
                get.answer.set_result(memoryview(b""))
            for queue in (self.pauses, self.store.asked):
                while not queue.empty():
                    queue.get_nowait()


@pytest.mark.parametrize("answer", [memoryview(b"first"), FIRST], ids=["bytes", "an error"])
async def test_a_get_that_is_not_slow_stays_alone(answer: memoryview | Exception) -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        future = (await stage.store.asked.get()).answer
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
    assert reading.result() == answer
    assert stage.store.asked.empty()
    assert (stage.reads.hedged_requests, stage.reads.hedge_wins) == (0, 0)


@pytest.mark.parametrize("winner", [0, 1])
async def test_one_get_wins_and_the_other_is_cancelled(winner: int) -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        gets = await stage.both_gets()
        assert stage.slots.taken == [10]
        gets[winner].answer.set_result(memoryview(b"bytes"))
    assert reading.result() == b"bytes"
    assert gets[1 - winner].answer.cancelled()
    assert stage.slots.taken == []
    assert (stage.reads.hedged_requests, stage.reads.hedge_wins) == (1, winner)


@pytest.mark.parametrize("error", [FIRST, SECOND])
@pytest.mark.parametrize("failing", [0, 1])
async def test_the_error_of_one_leaves_the_other_running(failing: int, error: RemoteStorageError) -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        gets = await stage.both_gets()
        gets[failing].answer.set_exception(error)
        await settle()
        assert not reading.done()
        gets[1 - failing].answer.set_result(memoryview(b"other"))
    assert reading.result() == b"other"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_when_both_fail_the_error_of_the_first_is_raised(order: tuple[int, int]) -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        gets = await stage.both_gets()
        for place in order:
            gets[place].answer.set_exception((FIRST, SECOND)[place])
            await settle()
    assert reading.result() is FIRST
    assert stage.slots.taken == []


async def test_a_caller_that_gives_up_ends_both() -> None:
    stage = Stage()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stage.read())
        gets = await stage.both_gets()
        reading.cancel()
    assert reading.cancelled()
    assert all(get.answer.cancelled() for get in gets)
    assert stage.slots.taken == []


async def test_no_second_get_without_an_idle_slot() -> None:
    stage = Stage()
    stage.slots.idle = 0
    await stage.take(1, is_slow=True)
    assert stage.reads.hedged_requests == 0


async def test_switched_off_no_get_is_watched() -> None:
    stage = Stage(max_percent=0)
    await stage.take(*[1] * 30)
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.read())
        first = await stage.store.asked.get()
        await settle()
        assert stage.pauses.empty()
        first.answer.set_result(memoryview(b"first"))


@settings(max_examples=40, deadline=None)
@given(slow=st.lists(st.booleans(), max_size=60), percent=st.integers(1, 50))
async def test_hedges_are_never_more_than_their_part(slow: list[bool], percent: int) -> None:
    stage = Stage(percent)
    for number, is_slow in enumerate(slow, 1):
        before = stage.reads.hedged_requests
        await stage.take(0, is_slow=is_slow)
        assert stage.reads.hedged_requests - before <= is_slow
        assert stage.reads.hedged_requests * 100 <= number * percent
    if all(slow):
        assert stage.reads.hedged_requests == len(slow) * percent // 100


async def test_calm_times_save_up_only_a_few_hedges() -> None:
    stage = Stage(50)
    await stage.take(*[1] * 100)
    await stage.take(*[0] * 24, is_slow=True)
    assert stage.reads.hedged_requests == 21


async def test_slow_is_what_takes_longer_than_almost_all_others() -> None:
    stage = Stage()
    assert stage.reads.delay_ms == 2_000
    for latencies, delay_ms in (
        (range(101, 120), 2_000),
        (range(120, 201), 196),
        ([3] * 128, 50),
        ([60_000] * 10, 2_000),
    ):
        await stage.take(*latencies)
        assert stage.reads.delay_ms == delay_ms


async def test_a_get_that_was_hedged_still_counts_as_slow() -> None:
    """Otherwise the limit would sink with every hedge."""
    stage = Stage()
    await stage.take(*[100] * 128)
    for _ in range(7):
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.read())
            _, second = await stage.both_gets()
            stage.now_ms += 250
            second.answer.set_result(memoryview(b""))
    assert stage.reads.delay_ms == 250
