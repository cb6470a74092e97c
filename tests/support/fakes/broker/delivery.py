"""The ways in which a broker sends an answer, or fails to. A delivery is the last step of a script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.primitives import INT32
from tests.support.fakes.broker.wire import Wire, frame

Deliver = Callable[[Wire, bytes], Awaitable[None]]
"""Sends a response payload, which includes its header."""


async def whole(wire: Wire, payload: bytes) -> None:
    await wire.send(payload)


def truncated(missing_bytes: int) -> Deliver:
    """Sends a frame with a correct length whose message ends too early."""

    async def deliver(wire: Wire, payload: bytes) -> None:
        await wire.send(payload[:-missing_bytes])

    return deliver


def prolonged(extra: bytes) -> Deliver:
    """Sends a message with extra bytes behind it, in one frame."""

    async def deliver(wire: Wire, payload: bytes) -> None:
        await wire.send(payload + extra)

    return deliver


def with_correlation_id(correlation_id: int) -> Deliver:
    async def deliver(wire: Wire, payload: bytes) -> None:
        await wire.send(INT32.pack(correlation_id) + payload[4:])

    return deliver


def closed_after(count: int) -> Deliver:
    """Closes the connection after `count` bytes of the frame, which include the length."""

    async def deliver(wire: Wire, payload: bytes) -> None:
        await wire.send_raw(frame(payload)[:count])
        await wire.close()

    return deliver


class Stall:
    """Sends no bytes beyond `after_bytes` until `end` is set. `begun` is set when the answer exists. Use `deliver`."""

    def __init__(self, after_bytes: int = 0) -> None:
        self.begun = asyncio.Event()
        self.end = asyncio.Event()
        self._after_bytes = after_bytes

    async def deliver(self, wire: Wire, payload: bytes) -> None:
        data = frame(payload)
        await wire.send_raw(data[: self._after_bytes])
        self.begun.set()
        await self.end.wait()
        await wire.send_raw(data[self._after_bytes :])
