"""A fake `Exchange`: one request of one connection, as a handler sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from protocol.addresses import AddressOf
from protocol.apis.fetch.request import parse_fetch_request
from protocol.header import parse_request_header
from protocol.primitives import Buffer
from proxy.wire.exchange import Request
from tests.support.fakes.broker.cluster import FakeCluster
from tiers.broker.client import monotonic_ms


class FakeExchange:
    """One request of one connection to the fake cluster."""

    def __init__(
        self,
        cluster: FakeCluster,
        frame: bytes,
        connection_id: int = 1,
        answer: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`answer` answers the requests that the handler sends on the client's connection. None: the cluster does."""
        header = parse_request_header(frame)
        self.request = Request(header.api_key, header.api_version, header.correlation_id, frame, monotonic_ms())
        self.tier = "none"
        self.on_sent: Callable[[], None] | None = None
        self.on_abandoned: Callable[[], None] | None = None
        self.connection_id = connection_id
        self.node_id: int | None = 1
        self.address_of: AddressOf = lambda node_id: ("proxy", 19092 + node_id)
        self.may_forward = True
        self.counts_decoded = False
        self._cluster = cluster
        self._answer = answer

    def count_decoded(self) -> None:
        self.counts_decoded = True

    def try_forward(self, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        return self._poll(bytes(frame)) if self.may_forward else None

    async def _poll(self, frame: bytes) -> memoryview:
        if self._answer is not None:
            return memoryview(self._answer(frame))
        header = parse_request_header(frame)
        request = parse_fetch_request(frame, header.body_position, header.api_version)
        self._cluster.polled.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.max_wait_ms / 1000):
                await self._cluster.arrived.wait()
        return memoryview(self._cluster.answer(frame))
