"""Large messages are decoded in a thread, and many items are worked on in slices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from proxy.handlers.fair_order import FairOrder
from proxy.handlers.off_loop import (
    LOOP_BYTES,
    SLICE_ITEMS,
    Decoder,
    decide_when_decoded,
    in_slices,
    off_loop,
    off_loop_in_slices,
)
from proxy.wire.exchange import Forward, HandlerState, Prepare


def is_on_the_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(("size_bytes", "on_the_loop"), [(LOOP_BYTES, True), (LOOP_BYTES + 1, False)])
async def test_a_large_message_is_decoded_in_the_thread(size_bytes: int, on_the_loop: bool) -> None:
    assert await off_loop(size_bytes, is_on_the_loop) == on_the_loop


async def test_the_loop_turns_while_the_thread_decodes() -> None:
    turned = threading.Event()

    def decode() -> bool:
        return turned.wait(60)

    async with asyncio.TaskGroup() as tasks:
        decoding = tasks.create_task(off_loop(LOOP_BYTES + 1, decode))
        await asyncio.sleep(0)
        turned.set()
    assert decoding.result()


class Doubling(HandlerState):
    def on_response(self, response: memoryview) -> tuple[bytes, bytes]:
        return bytes(response), bytes(response)

    def on_abandoned(self) -> None:
        return


def decide(decoded_on_the_loop: bool) -> tuple[Forward, HandlerState | None]:
    assert is_on_the_loop()
    return Forward(b"loop" if decoded_on_the_loop else b"thread", hold_bytes=None), Doubling()


async def test_a_small_request_is_decided_about_at_once() -> None:
    action, state = decide_when_decoded(LOOP_BYTES, is_on_the_loop, decide)
    assert isinstance(action, Forward)
    assert action.frame == b"loop"
    assert isinstance(state, Doubling)


async def test_a_large_request_is_decided_about_when_it_is_decoded() -> None:
    action, state = decide_when_decoded(LOOP_BYTES + 1, is_on_the_loop, decide)
    assert isinstance(action, Prepare)
    assert await action.decide() == Forward(b"thread", hold_bytes=None)
    assert state is not None
    assert state.on_response(memoryview(b"x")) == (b"x", b"x")


async def test_a_large_request_without_a_state_passes_its_response_on() -> None:
    action, state = decide_when_decoded(LOOP_BYTES + 1, lambda: None, lambda _: (Forward(b""), None))
    assert isinstance(action, Prepare)
    await action.decide()
    assert state is not None
    assert state.on_response(memoryview(b"x")) == (b"x",)


async def test_many_items_leave_the_loop_its_turns() -> None:
    turns = 0
    seen_at: list[int] = []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def work(item: int) -> int:
        seen_at.append(turns)
        return 2 * item

    items = list(range(3 * SLICE_ITEMS))
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count_turns())
        assert await in_slices(items, work) == [2 * item for item in items]
        counting.cancel()
    assert all(seen_at.count(turn) <= SLICE_ITEMS for turn in set(seen_at))


KIB = 1024
SMALL, LARGE = 8 * KIB, 1024 * KIB


async def decoded_in_order(sizes: list[int], cancelled: int = 0) -> list[int]:
    """Returns the numbers of the messages in the order in which the thread decodes them.

    The thread is busy until all messages have arrived. The clients of the first `cancelled` messages have then left."""
    decoder, all_wait, order = Decoder(), threading.Event(), list[int]()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(decoder.run(1, lambda: all_wait.wait(60)))
        await asyncio.sleep(0)
        waiting = [
            tasks.create_task(decoder.run(size, partial(order.append, number))) for number, size in enumerate(sizes)
        ]
        await asyncio.sleep(0)
        for task in waiting[:cancelled]:
            task.cancel()
        await asyncio.sleep(0)
        all_wait.set()
    return order


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


async def test_a_message_of_many_items_leaves_the_thread_to_others() -> None:
    turns: list[str] = []

    def square(part: Sequence[int]) -> list[int]:
        turns.append("slice")
        return [each * each for each in part]

    async with asyncio.TaskGroup() as tasks:
        squares = tasks.create_task(off_loop_in_slices(8 * LOOP_BYTES, range(4 * SLICE_ITEMS), square))
        await asyncio.sleep(0)
        tasks.create_task(off_loop(LOOP_BYTES + 1, lambda: turns.append("other")))
    assert sorted(turns) == ["other", *["slice"] * 4]
    assert turns.index("other") <= 1
    assert squares.result() == [each * each for each in range(4 * SLICE_ITEMS)]


async def test_a_small_message_overtakes_those_of_20_clients() -> None:
    assert (await decoded_in_order([LARGE] * 20 + [SMALL]))[0] == 20


async def test_equal_messages_are_decoded_in_the_order_of_arrival() -> None:
    assert await decoded_in_order([LARGE] * 5) == [0, 1, 2, 3, 4]


async def test_the_message_of_a_client_that_left_is_not_decoded() -> None:
    assert await decoded_in_order([LARGE] * 5, cancelled=3) == [3, 4]


def test_small_messages_without_end_leave_a_large_one_its_turn() -> None:
    order = FairOrder[str]()
    order.add(LARGE, "large")
    taken: list[str] = []
    for _ in range(2 * LARGE // SMALL + 1):
        order.add(SMALL, "small")
        size_bytes, message = order.take()
        order.decoded(size_bytes)
        taken.append(message)
    assert taken.index("large") >= LARGE // SMALL


def test_a_small_message_waits_for_its_share_alone_under_steady_load() -> None:
    """20 clients send a large message again as soon as the last one is decoded."""
    order = FairOrder[str]()
    for _ in range(20):
        order.add(LARGE, "large")

    def decode_large() -> None:
        size_bytes, message = order.take()
        assert message == "large"
        order.decoded(size_bytes)
        order.add(LARGE, "large")

    for _ in range(100):
        order.add(SMALL, "small")
        size_bytes, message = order.take()
        assert message == "small"
        order.decoded(size_bytes)
        decode_large()


def test_messages_of_clients_that_left_are_no_share() -> None:
    """A client that leaves again and again brings its other connections no nearer to their turns."""
    order = FairOrder[str]()
    order.add(LARGE, "large")
    for _ in range(100):
        order.add(SMALL, "left")
        assert order.take() == (SMALL, "left")
    order.add(SMALL, "small")
    assert order.take() == (SMALL, "small")


async def test_a_message_that_is_not_decoded_brings_no_other_nearer() -> None:
    decoder, all_wait = Decoder(), threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(decoder.run(SMALL, lambda: all_wait.wait(60)))
        await asyncio.sleep(0)
        leaving = [tasks.create_task(decoder.run(LARGE, lambda: None)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.sleep(0)
        all_wait.set()
    await decoder.run(SMALL, lambda: None)
    assert decoder._order._shared_bytes <= 2 * SMALL
