"""Large messages are decoded in a thread, and many items are worked on in slices."""

from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.handlers.off_loop import LOOP_BYTES, SLICE_ITEMS, decide_when_decoded, in_slices, off_loop
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
    assert (await action.forward()).frame == b"thread"
    assert state is not None
    assert state.on_response(memoryview(b"x")) == (b"x", b"x")


async def test_a_large_request_without_a_state_passes_its_response_on() -> None:
    action, state = decide_when_decoded(LOOP_BYTES + 1, lambda: None, lambda _: (Forward(b""), None))
    assert isinstance(action, Prepare)
    await action.forward()
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
