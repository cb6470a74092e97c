"""A connection whose opening fails or is cancelled ends at once, whatever the broker does."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from pathlib import Path

import pytest

from tests.support.proxy.tls_sides import HangingTlsBroker, client_side
from tests.support.servers.certificates import Authority
from tiers.broker.connection import BrokerConnection
from tiers.broker.tls import explain
from tiers.errors import BrokerError, BrokerRefusedError

AT_ONCE_S = 20
"""Less than the 30 s for which the event loop waits for the end of a TLS connection."""


async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> BrokerConnection:
    return await BrokerConnection.connect(
        host, port, client_id="test", clock_ms=lambda: 0, timeout_ms=60_000, ssl_context=tls
    )


async def test_a_cancelled_opening_ends_the_connection_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    made = BrokerConnection.connection_made
    async with HangingTlsBroker(authority) as broker:

        def made_and_cancelled(connection: BrokerConnection, transport: asyncio.BaseTransport) -> None:
            made(connection, transport)
            connecting.cancel()

        monkeypatch.setattr(BrokerConnection, "connection_made", made_and_cancelled)
        connecting = asyncio.create_task(connect("127.0.0.1", broker.port, client_side(authority)))
        with pytest.raises(asyncio.CancelledError):
            await connecting
        async with asyncio.timeout(AT_ONCE_S):
            await broker.ended.wait()


@pytest.mark.parametrize(("host", "has_tls"), [("", True), ("a..b", False)])
async def test_an_invalid_host_name_is_an_error_of_the_broker(tmp_path: Path, host: str, has_tls: bool) -> None:
    with pytest.raises(BrokerError):
        await connect(host, 1, client_side(Authority(tmp_path)) if has_tls else None)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "this is no Kafka port (HTTP?)"),
        (b"SSH-2.0-OpenSSH\r\n", "this is no Kafka port (it announced a response of 1397966893 bytes)"),
        (b"\xff\xff\xff\xff", "this is no Kafka port (it announced a response of -1 bytes)"),
    ],
)
async def test_a_port_that_is_not_kafkas_is_told_apart(answer: bytes, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerError, match=re.escape(f"127.0.0.1:{port}: {said}")):
            await connect("127.0.0.1", port)


def _closed_by_peer() -> ssl.SSLError:
    error = ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed (EOF)")
    error.reason = None  # type: ignore[assignment]  # as OpenSSL leaves it
    error.library = None  # type: ignore[assignment]  # as OpenSSL leaves it
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9092)"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError("Multiple exceptions: one, two"), "Multiple exceptions: one, two"),
        (TimeoutError(), "timed out"),
        (_closed_by_peer(), "it closed the TLS connection"),
    ],
)
def test_the_reason_of_a_failed_connection_is_said_without_the_address(error: OSError, said: str) -> None:
    assert explain(error) == said


async def test_a_broker_of_another_authority_is_refused(tmp_path: Path) -> None:
    ours, others = (Authority(tmp_path / name) for name in ("ours", "others"))
    async with HangingTlsBroker(others) as broker:
        with pytest.raises(BrokerRefusedError, match="certificate"):
            await connect("127.0.0.1", broker.port, client_side(ours))
