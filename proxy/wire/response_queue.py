"""Keeps the order of one connection: responses leave in the order of the requests (docs/semantics.md 1.4).

`slots` has the requests in the client's order, `awaiting` in the broker's. A slot leaves `awaiting` when its response
begins, and `slots` when its answer is written. A request without a response (Produce with acks=0) enters neither.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Protocol

from protocol.addresses import AddressOf
from protocol.api_keys import ApiKey
from protocol.primitives import Buffer
from proxy.wire.exchange import BrokerGoneError, Buffers, Request, Respond, ResponsePatcher
from proxy.wire.memory import DECODED_FACTOR, FLOOR_BYTES, MessageBudget, MessageGrant


class SlotOwner(Protocol):
    """The connection that a slot belongs to."""

    @property
    def connection_id(self) -> int:
        """Changes with every authentication."""

    @property
    def node_id(self) -> int | None: ...

    @property
    def address_of(self) -> AddressOf: ...

    def on_authentication(self) -> None:
        """Changes `connection_id`, because the following requests may have another principal."""

    def try_forward(self, slot: Slot, frame: Buffer) -> Coroutine[None, None, memoryview] | None: ...


class Slot:
    """One request in progress. It is the `Exchange` that the handler sees.

    Most requests leave most fields as the class has them, so that a slot takes little time to make."""

    request: Request
    """Set only for a request that is held."""
    tier = "none"
    on_sent: Callable[[], None] | None = None
    hold_bytes: int | None = 0
    patcher: Callable[[], ResponsePatcher] | None = None
    passes: Callable[[memoryview], bool] | None = None
    on_abandoned: Callable[[], None] | None = None
    respond: Respond | None = None
    decoded_bytes = 0
    """The size of the request in decoded form. 0: it is not decoded, or its answer is complete."""
    grant: MessageGrant | None = None
    """The memory for the request in decoded form, if it is large."""
    response_grant: MessageGrant | None = None
    """The memory for the broker's response and the answer, then for the answer. `on_sent` releases it."""
    answer: Buffers | None = None
    task: asyncio.Task[None] | None = None
    future: asyncio.Future[memoryview] | None = None
    """Set for a request of the proxy itself (`try_forward`), which has no place in the client's order."""
    is_raw_token = False
    """Whether the request is a raw token. Neither the token nor the answer to it has a header."""

    def __init__(self, owner: SlotOwner, api_key: int, api_version: int, correlation_id: int, started_s: float) -> None:
        self.owner = owner
        self.connection_id = owner.connection_id
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.upstream_correlation_id = correlation_id
        """The correlation id of the request that was sent to the broker."""
        self.started_s = started_s

    @property
    def node_id(self) -> int | None:
        return self.owner.node_id

    @property
    def address_of(self) -> AddressOf:
        return self.owner.address_of

    def count_decoded(self) -> None:
        self.decoded_bytes = DECODED_FACTOR * len(self.request.frame)
        if self.grant is not None:
            self.grant.resize(self.decoded_bytes)

    def try_forward(self, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        return self.owner.try_forward(self, frame)

    @property
    def awaits_broker(self) -> bool:
        return self.answer is None and self.task is None

    def holds(self, size_bytes: int) -> bool:
        """Whether the connection collects a response of this size for `respond`."""
        return self.hold_bytes is None or size_bytes <= self.hold_bytes

    def runs(self, task: asyncio.Task[None], answer: Coroutine[None, None, Buffers]) -> None:
        """Notes `task`, which awaits `answer`.

        A task that is cancelled before its first step neither runs nor closes `answer`, so a callback closes it."""
        self.task = task
        task.add_done_callback(lambda _: answer.close())

    def complete(self, answer: Buffers, responses: MessageBudget) -> None:
        """Takes the answer that a handler made of the broker's response. A large one counts until it has been sent."""
        self.answer = answer
        owner, size_bytes = id(self.owner), sum(map(len, answer))
        if self.response_grant is not None:
            self.response_grant.resize(size_bytes if size_bytes > FLOOR_BYTES else 0)
        elif size_bytes > FLOOR_BYTES and self.on_sent is None and responses.held(owner) is None:
            self.response_grant = responses.charge(owner, size_bytes)
            self.on_sent = self.response_grant.release

    def abandon(self) -> None:
        """Ends all work for this request. The connection calls it once, and only while there is no answer."""
        if self.future is not None and not self.future.done():
            self.future.cancel()
        if self.task is not None:
            self.task.cancel()
        if self.on_abandoned is not None:
            self.on_abandoned()
        self.end()

    def release(self) -> None:
        """Frees the decoded form of the request, because its answer is complete or needs no handler."""
        self.respond = self.on_abandoned = None
        self.decoded_bytes = 0
        if self.grant is not None:
            self.grant.release()

    def end(self) -> None:
        """Calls `on_sent`, because the answer will not be sent."""
        self.release()
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
        """The client's request that was sent to the broker last. Only its handler may still use `try_forward`."""

    @property
    def is_full(self) -> bool:
        return len(self.slots) >= self.max_in_flight

    def push_sent(self, slot: Slot) -> None:
        self.slots.append(slot)
        self.awaiting.append(slot)
        self.last_sent = slot

    def push_preparing(self, slot: Slot) -> None:
        """Adds a request that will be sent later. Until then, its handler may send requests of its own before it."""
        self.slots.append(slot)
        self.last_sent = slot

    def push_answered(self, slot: Slot) -> None:
        self.slots.append(slot)

    @property
    def waits_for_long_poll(self) -> bool:
        """Whether the next answer has to wait for a long poll of the broker.

        A broker begins the next request of a connection when it has answered the one before, so a long poll that a
        drain answered early delays those behind it. A ShareFetch is not answered early: it may acknowledge records."""
        if not self.slots or not self.slots[0].awaits_broker:
            return False
        is_answered_early = bool(self.awaiting) and self.awaiting[0].answer is not None
        return is_answered_early or self.slots[0].api_key == ApiKey.SHARE_FETCH

    @property
    def has_answer(self) -> bool:
        """Whether the answer of the head slot may leave now."""
        slots = self.slots
        return bool(slots) and slots[0].answer is not None

    def fail_own(self) -> None:
        """Fails the requests of the proxy itself that still wait, because no more responses come from the broker."""
        for slot in self.awaiting:
            if slot.future is not None and not slot.future.done():
                slot.future.set_exception(BrokerGoneError())
                slot.future.exception()  # its handler may have given it up

    def abandon_all(self) -> None:
        """Ends all requests, because the connection is gone."""
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
