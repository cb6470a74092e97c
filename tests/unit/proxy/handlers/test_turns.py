"""A message is worked on in slices, and no turn of the event loop has more than one slice that waited."""

from __future__ import annotations

import asyncio

import pytest

from protocol.steps import Steps
from proxy.handlers.turns import (
    SLICE_ITEMS,
    SLICE_STEPS,
    decide_in_turns,
    in_slices,
    in_turns,
    next_turn,
    patch_in_turns,
    slices_of,
)
from proxy.wire.exchange import Buffers, Forward, Prepare, Respond
from tests.support.proxy.turn_counter import TurnCounter, counted_turns


def counting(count: int, turns: TurnCounter | None = None) -> Steps[int]:
    for _ in range(count):
        if turns is not None:
            turns.note()
        yield
    return count


def doubled(response: memoryview) -> tuple[bytes, bytes]:
    return bytes(response), bytes(response)


def deciding(count: int, respond: Respond | None) -> Steps[tuple[Forward, Respond | None]]:
    yield from counting(count)
    return Forward(b"", hold_bytes=None), respond


def patching(count: int) -> Steps[Buffers]:
    yield from counting(count)
    return (b"x",)


async def test_a_large_message_is_decoded_in_slices() -> None:
    async with counted_turns() as turns:
        assert await in_turns(counting(3 * SLICE_STEPS, turns)) == 3 * SLICE_STEPS
    assert max(turns.notes.values()) == SLICE_STEPS


async def test_a_turn_has_one_slice_of_many_large_messages() -> None:
    count = 20
    async with counted_turns() as turns, asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(in_turns(counting(4 * SLICE_STEPS, turns)))
    first = min(turns.notes)
    assert sum(turns.notes.values()) == count * 4 * SLICE_STEPS
    assert max(each for turn, each in turns.notes.items() if turn > first) <= SLICE_STEPS


async def test_a_small_message_waits_for_none_of_20_large_ones() -> None:
    async with asyncio.TaskGroup() as tasks:
        large = [tasks.create_task(in_turns(counting(100 * SLICE_STEPS))) for _ in range(20)]
        await asyncio.sleep(0)
        small = in_turns(counting(SLICE_STEPS - 1))
        with pytest.raises(StopIteration):
            small.send(None)
        for task in large:
            task.cancel()


async def test_the_slices_of_large_messages_have_their_turns_in_order() -> None:
    order: list[int] = []

    async def slices(number: int) -> None:
        for _ in range(3):
            await next_turn()
            order.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(slices(number))
    assert order == [0, 1, 2, 3] * 3


async def test_the_message_of_a_client_that_left_ends() -> None:
    ended: list[str] = []

    def steps() -> Steps[None]:
        try:
            yield from counting(2 * SLICE_STEPS)
        finally:
            ended.append("steps")

    async with asyncio.TaskGroup() as tasks:
        left = tasks.create_task(in_turns(steps()))
        other = tasks.create_task(in_turns(counting(2 * SLICE_STEPS)))
        await asyncio.sleep(0)
        left.cancel()
    assert ended == ["steps"]
    assert other.result() == 2 * SLICE_STEPS


async def test_only_a_large_request_is_decided_about_later() -> None:
    assert decide_in_turns(deciding(SLICE_STEPS - 1, doubled)) == (Forward(b"", hold_bytes=None), doubled)
    for asked, answered in ((doubled, (b"x", b"x")), (None, (b"x",))):
        action, later = decide_in_turns(deciding(SLICE_STEPS, asked))
        assert isinstance(action, Prepare)
        assert await action.decide() == Forward(b"", hold_bytes=None)
        assert later is not None
        assert later(memoryview(b"x")) == answered


async def test_only_a_large_response_is_patched_later() -> None:
    assert patch_in_turns(patching(SLICE_STEPS - 1)) == (b"x",)
    later = patch_in_turns(patching(SLICE_STEPS))
    assert asyncio.iscoroutine(later)
    assert await later == (b"x",)


async def test_many_items_leave_the_loop_its_turns() -> None:
    async with counted_turns() as turns:

        async def work(item: int) -> int:
            turns.note()
            return 2 * item

        items = list(range(3 * SLICE_ITEMS))
        assert await in_slices(items, work) == [2 * item for item in items]
        async for part in slices_of(items, SLICE_ITEMS):
            for _ in part:
                turns.note()
    assert max(turns.notes.values()) <= SLICE_ITEMS


async def test_the_timeouts_of_slices_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    loop, passed_s = asyncio.get_running_loop(), 0
    time = loop.time

    async def fail_late(item: int) -> None:
        nonlocal passed_s
        tried.append(item)
        passed_s = 60

    with monkeypatch.context() as slow:
        slow.setattr(loop, "time", lambda: time() + passed_s)
        await in_slices(range(100 * SLICE_ITEMS), fail_late, within_ms=30_000)
    assert tried == list(range(SLICE_ITEMS))
