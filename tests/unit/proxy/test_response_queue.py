"""A slot whose connection ends leaves nothing of its answer behind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine

from protocol.addresses import AddressOf
from proxy.wire.exchange import Buffers
from proxy.wire.response_queue import Slot


class Owner:
    connection_id = 1
    node_id = None

    @property
    def address_of(self) -> AddressOf:
        return lambda node_id: None

    def try_forward(self, slot: Slot, frame: object) -> Coroutine[None, None, memoryview] | None:
        return None

    def on_authentication(self) -> None: ...


async def test_an_answer_that_was_cancelled_before_it_ran_is_closed() -> None:
    async def answer() -> Buffers:
        return (b"never",)

    async def finish(pending: Coroutine[None, None, Buffers]) -> None:
        await pending

    slot = Slot(Owner(), 1, 12, 7, 0.0)
    pending = answer()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(finish(pending))
        slot.runs(task, pending)
        slot.abandon()
    assert task.cancelled()
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(pending) == inspect.CORO_CLOSED
