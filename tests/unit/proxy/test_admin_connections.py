"""The admin port beside strangers: their connections are few, and end after a time."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.process.admin import connections as admin_connections
from proxy.process.admin.connections import AdminConnections
from proxy.process.admin.http import Health, admin_http
from proxy.wire.server import bind
from tests.support.proxy.tls_sides import broker_side, client_side
from tests.support.servers.certificates import Authority

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
KEPT_REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@asynccontextmanager
async def port_of(
    most: int, age_s: float, tls: ssl.SSLContext | None = None, gate: asyncio.Event | None = None
) -> AsyncIterator[int]:
    """`gate`: the page is ready when it is set."""

    async def answer(request: web.BaseRequest) -> web.Response:
        if gate is not None:
            await gate.wait()
        return web.Response(text="page")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    assert runner.server is not None
    try:
        listener = bind("127.0.0.1", 0, reuse_port=False)
        async with AdminConnections(
            listener, runner.server, None if tls is None else lambda: tls, most=most, age_s=age_s, grace_s=0.01
        ):
            yield listener.getsockname()[1]
    finally:
        await runner.cleanup()


async def ends(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_request_in_progress_outlasts_any_number_of_silent_connections() -> None:
    gate = asyncio.Event()
    async with asyncio.timeout(30), port_of(most=2, age_s=300, gate=gate) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for stranger, _ in strangers[:-1]:
            assert await ends(stranger)
        gate.set()
        assert (await reader.read()).endswith(b"page")
        for _, each in [*strangers, (reader, writer)]:
            each.close()


async def test_a_connection_that_has_ended_takes_no_place() -> None:
    async with asyncio.timeout(30), port_of(most=2, age_s=300) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(KEPT_REQUEST)
        assert (await reader.readuntil(b"page")).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            other, its_writer = await asyncio.open_connection("127.0.0.1", port)
            its_writer.write(REQUEST)
            assert (await other.read()).endswith(b"page")
            its_writer.close()
        writer.write(REQUEST)
        assert (await reader.read()).endswith(b"page")
        writer.close()


async def test_a_connection_in_its_tls_handshake_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_connections, "TLS_HANDSHAKE_S", 60.0)
    authority = Authority(tmp_path)
    async with asyncio.timeout(30), port_of(1, 300, broker_side(authority)) as port:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for reader, _ in strangers[:-1]:
            assert await ends(reader)
        reader, client = await asyncio.open_connection("localhost", port, ssl=client_side(authority))
        client.write(REQUEST)
        assert (await reader.read()).endswith(b"page")
        client.close()
        for _, writer in strangers:
            writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", None], ids=["silent", "half a request", "after a handshake"])
async def test_a_connection_ends_after_a_time(sent: bytes | None, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours, theirs, age_s = (broker_side(authority), client_side(authority), 0.5) if sent is None else (None, None, 0.01)
    async with asyncio.timeout(30), port_of(2, age_s, ours) as port:
        reader, writer = await asyncio.open_connection("localhost" if theirs else "127.0.0.1", port, ssl=theirs)
        writer.write(sent or b"")
        assert await ends(reader)
        writer.close()


async def test_a_request_that_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(30), admin_http(("127.0.0.1", 0), CollectorRegistry(), Health(list, list)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        writer.close()
    assert not caplog.records
