"""The admin port beside strangers: their connections are few, and end after a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.process.admin_connections import AdminConnections
from proxy.process.admin_http import admin_http

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def port_of(most: int, age_s: float) -> AsyncIterator[int]:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text="page")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    assert runner.server is not None
    connections = AdminConnections(runner.server, most=most, age_s=age_s, grace_s=0.01)
    server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        connections.close()
        await runner.cleanup()


async def ends(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_at_the_limit_the_oldest_connection_gives_way() -> None:
    async with asyncio.timeout(30), port_of(most=2, age_s=300) as port:
        oldest, writer = await asyncio.open_connection("127.0.0.1", port)
        _, other = await asyncio.open_connection("127.0.0.1", port)
        reader, newest = await asyncio.open_connection("127.0.0.1", port)
        newest.write(REQUEST)
        assert (await reader.read()).endswith(b"page")
        assert await ends(oldest)
        for each in (writer, other, newest):
            each.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT"], ids=["silent", "half a request"])
async def test_a_connection_ends_after_a_time(sent: bytes) -> None:
    async with asyncio.timeout(30), port_of(most=2, age_s=0.01) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await ends(reader)
        writer.close()


async def test_a_request_that_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(30), admin_http(("127.0.0.1", 0), CollectorRegistry(), list) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        writer.close()
    assert not caplog.records
