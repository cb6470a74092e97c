"""A Fetch client that sends a test's exact requests on one connection, and returns the unchanged answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import FetchRequest, parse_fetch_request
from protocol.apis.fetch.response import FetchResponse, parse_fetch_response
from protocol.header import parse_request_header, response_body_position
from protocol.primitives import INT32
from proxy.handlers.fetch.handler import FetchHandler
from proxy.wire.exchange import Answer, Exchange, Forward, Prepare, Respond
from tests.support.fakes.broker.fetch_frames import Ask, fetch_frame

TIMEOUT_S = 300.0


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, version: int, asks: Sequence[Ask], **more: Any) -> None:
        frame = fetch_frame(version, asks, **more)
        self._writer.write(INT32.pack(len(frame)) + frame)
        await self._writer.drain()

    async def receive(self, version: int) -> FetchResponse:
        async with asyncio.timeout(TIMEOUT_S):
            (size,) = INT32.unpack(await self._reader.readexactly(4))
            payload = await self._reader.readexactly(size)
        return parse_fetch_response(payload, response_body_position(ApiKey.FETCH, version, payload), version)

    async def fetch(self, version: int, asks: Sequence[Ask] = (), **more: Any) -> FetchResponse:
        await self.send(version, asks, **more)
        return await self.receive(version)


@asynccontextmanager
async def raw_client(address: str) -> AsyncIterator[RawClient]:
    """Yields a client. `address` is `host:port`."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()


class Forwarded:
    """Records every Fetch that the proxy changed: as the client sent it, and as the proxy forwarded it."""

    def __init__(self, handler: FetchHandler) -> None:
        self.changed: list[tuple[FetchRequest, FetchRequest | None]] = []
        """None: the proxy did not forward the request."""
        self._on_request = handler.on_request
        handler.on_request = self._record  # type: ignore[method-assign]  # replaced by a recorder for one test

    def _record(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        sent = bytes(exchange.request.frame)
        action, respond = self._on_request(exchange)
        if not isinstance(action, Prepare):
            self._add(sent, action)
            return action, respond
        decide = action.decide

        async def recorded() -> Answer | Forward:
            decided = await decide()
            self._add(sent, decided)
            return decided

        return Prepare(recorded), respond

    def _add(self, sent: bytes, action: Answer | Forward) -> None:
        forwarded = bytes(action.frame) if isinstance(action, Forward) else None
        if forwarded != sent:
            self.changed.append((_parse(sent), None if forwarded is None else _parse(forwarded)))


def _parse(frame: bytes) -> FetchRequest:
    header = parse_request_header(frame)
    return parse_fetch_request(frame, header.body_position, header.api_version)
