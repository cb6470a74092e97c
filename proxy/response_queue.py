"""The order of one connection: responses leave in the order of the requests, whoever answers them (semantics 1.4).

`slots` is the client's order, `awaiting` the broker's. A slot leaves `awaiting` when its response begins and `slots`
when its answer has been written. Requests without a response (Produce with acks=0) enter neither.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Protocol

from protocol.primitives import Buffer
from proxy.exchange import Buffers, HandlerState, Request, ResponsePatcher


class SlotOwner(Protocol):
    """The connection that a slot belongs to."""

    @property
    def connection_id(self) -> int:
        """Another one after every authentication."""

    @property
    def node_id(self) -> int | None: ...

    def on_authentication(self) -> None:
        """The client may be somebody else for the requests that follow."""

    def try_forward(self, slot: Slot, frame: Buffer) -> Coroutine[None, None, memoryview] | None: ...


class Slot:
    """One request under way, and the `Exchange` that its handler sees."""

    __slots__ = (
        "answer",
        "api_key",
        "api_version",
        "connection_id",
        "correlation_id",
        "future",
        "hold_bytes",
        "is_raw_token",
        "on_sent",
        "owner",
        "patcher",
        "raw_tokens_after",
        "request",
        "started_s",
        "state",
        "task",
        "tier",
        "upstream_correlation_id",
    )

    request: Request
    """Set for the APIs that have a handler."""

    def __init__(self, owner: SlotOwner, api_key: int, api_version: int, correlation_id: int, started_s: float) -> None:
        self.owner = owner
        self.connection_id = owner.connection_id
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.upstream_correlation_id = correlation_id
        """Of the request as it went to the broker."""
        self.started_s = started_s
        self.tier = "none"
        self.on_sent: Callable[[], None] | None = None
        self.hold_bytes: int | None = 0
        self.patcher: ResponsePatcher | None = None
        self.state: HandlerState | None = None
        self.answer: Buffers | None = None
        self.task: asyncio.Task[None] | None = None
        self.future: asyncio.Future[memoryview] | None = None
        """Of a request of ours (`try_forward`), which has no place in the client's order."""
        self.is_raw_token = False
        """Neither it nor its answer has a header."""
        self.raw_tokens_after: int | None = 0
        """How many frames of the client are raw tokens once this is answered; None: all that follows."""

    @property
    def node_id(self) -> int | None:
        return self.owner.node_id

    def try_forward(self, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        return self.owner.try_forward(self, frame)

    @property
    def awaits_broker(self) -> bool:
        return self.answer is None and self.task is None

    def runs(self, task: asyncio.Task[None], answer: Coroutine[None, None, Buffers]) -> None:
        """`task` awaits `answer`; one that is cancelled before its first step would leave it neither run nor closed."""
        self.task = task
        task.add_done_callback(lambda _: answer.close())

    def abandon(self) -> None:
        """Ends what runs for this request. The connection calls it once, and not after the answer is there."""
        if self.future is not None and not self.future.done():
            self.future.cancel()
        if self.task is not None:
            self.task.cancel()
        if self.state is not None:
            state, self.state = self.state, None
            state.on_abandoned()
        self.end()

    def end(self) -> None:
        """The answer was not sent, and will not be."""
        if self.on_sent is not None:
            on_sent, self.on_sent = self.on_sent, None
            on_sent()


class ResponseQueue:
    __slots__ = ("awaiting", "last_sent", "max_in_flight", "slots")

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.slots: deque[Slot] = deque()
        self.awaiting: deque[Slot] = deque()
        self.last_sent: Slot | None = None
        """The client's request that went upstream last: nothing of ours may go before its successor any more."""

    @property
    def is_full(self) -> bool:
        return len(self.slots) >= self.max_in_flight

    def push_sent(self, slot: Slot) -> None:
        self.slots.append(slot)
        self.awaiting.append(slot)
        self.last_sent = slot

    def push_answered(self, slot: Slot) -> None:
        self.slots.append(slot)

    def take_answered(self) -> list[Slot]:
        """Slots at the head whose answers may leave now, in order."""
        slots = self.slots
        taken: list[Slot] = []
        while slots and slots[0].answer is not None:
            taken.append(slots.popleft())
        return taken

    def abandon_all(self) -> None:
        """The connection is gone."""
        for slot in self.awaiting:
            if slot.future is not None and not slot.future.done():
                slot.future.cancel()
        self.awaiting.clear()
        while self.slots:
            slot = self.slots.popleft()
            if slot.answer is None:
                slot.abandon()
            else:
                slot.end()
