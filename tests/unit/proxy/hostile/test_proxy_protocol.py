"""The PROXY protocol: mandatory where it is enabled, from load balancers alone, and before TLS."""

from __future__ import annotations

import asyncio
import contextlib
from ipaddress import ip_network
from pathlib import Path
from struct import pack

import pytest

from proxy.wire.exchange import Answer, Exchange, Forward, Respond
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import PATIENT, proxy_before, relayed
from tests.support.proxy.tls_sides import client_side, for_clients
from tests.support.servers.certificates import Authority

HERE = (ip_network("127.0.0.0/8"),)
SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
HANDLED = 1


def v2(command: int, family: int, body: bytes) -> bytes:
    return SIGNATURE + pack(">BBH", command, family, len(body)) + body


TCP4 = bytes([192, 0, 2, 7, 10, 0, 0, 1]) + pack(">HH", 5_000, 9_092)
TCP6 = bytes.fromhex("20010db8" + "00" * 11 + "07" + "00" * 16) + pack(">HH", 5_000, 9_092)
TLV = b"\x04" + pack(">H", 300) + bytes(300)
SEEN = {
    "v1 tcp4": (b"PROXY TCP4 192.0.2.7 10.0.0.1 5000 9092\r\n", "192.0.2.7:5000"),
    "v1 tcp6": (b"PROXY TCP6 2001:db8::7 ::1 5000 9092\r\n", "2001:db8::7:5000"),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", "127.0.0.1:"),
    "v1 unknown with addresses": (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", "127.0.0.1:"),
    "v2 tcp4": (v2(0x21, 0x11, TCP4), "192.0.2.7:5000"),
    "v2 tcp6": (v2(0x21, 0x21, TCP6), "2001:db8::7:5000"),
    "v2 with fields": (v2(0x21, 0x11, TCP4 + TLV), "192.0.2.7:5000"),
    "v2 local": (v2(0x20, 0x00, b""), "127.0.0.1:"),
    "v2 local with fields": (v2(0x20, 0x00, TLV), "127.0.0.1:"),
    "v2 unspecified": (v2(0x21, 0x00, TLV), "127.0.0.1:"),
    "v2 unix": (v2(0x21, 0x31, bytes(216)), "127.0.0.1:"),
}
REFUSED = {
    "no header": frame(request(OPAQUE, 4, 1, bytes(100))),
    "v1 without an end": b"PROXY TCP4 " + b"1" * 200,
    "v1 with another family": b"PROXY UDP4 192.0.2.7 10.0.0.1 5000 9092\r\n",
    "v1 with a bad address": b"PROXY TCP4 192.0.2.700 10.0.0.1 5000 9092\r\n",
    "v1 with a bad port": b"PROXY TCP4 192.0.2.7 10.0.0.1 65536 9092\r\n",
    "v1 with a missing port": b"PROXY TCP4 192.0.2.7 10.0.0.1 5000\r\n",
    "v2 with another version": v2(0x31, 0x11, TCP4),
    "v2 with another command": v2(0x22, 0x11, TCP4),
    "v2 without room": v2(0x21, 0x21, TCP4),
}


class Failing:
    """Closes the connection, so that a log line names the client."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        raise RuntimeError("a defect")


@pytest.mark.parametrize("case", SEEN)
@pytest.mark.parametrize("is_torn", [False, True])
async def test_the_header_names_the_client(case: str, is_torn: bool, caplog: pytest.LogCaptureFixture) -> None:
    header, client_address = SEEN[case]
    async with relayed(limits=PATIENT, handlers={HANDLED: Failing()}, proxy_networks=HERE) as (client, broker, _):
        sent = header + frame(request(OPAQUE, 4, 1))
        for start in range(0, len(sent), 1 if is_torn else len(sent)):
            await client.send_raw(sent[start : start + (1 if is_torn else len(sent))])
            await asyncio.sleep(0)
        upstream = await broker.accepted()
        assert await upstream.receive() == request(OPAQUE, 4, 1)
        await upstream.send(response(1))
        assert await client.receive() == response(1)
        await client.send(request(HANDLED, 4, 2))
        assert await client.ended() == b""
    (line,) = caplog.records
    assert line.__dict__["client"].startswith(client_address)
    assert line.__dict__["client_id"] == "test"


@pytest.mark.parametrize("case", REFUSED)
async def test_a_connection_without_a_valid_header_is_closed(case: str, caplog: pytest.LogCaptureFixture) -> None:
    async with relayed(proxy_networks=HERE) as (client, broker, proxy):
        await client.send_raw(REFUSED[case])
        assert await client.ended() == b""
        assert await proxy.closed_by("proxy_header") == {"proxy_header": 1}
        assert broker.connections_made == 0
    assert "PROXY header" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "sent",
    [b"", b"PROXY TCP4", SIGNATURE, v2(0x21, 0x11, bytes(65_535))[:5_000]],
    ids=["nothing", "torn v1", "torn v2", "large v2"],
)
async def test_a_header_that_does_not_end_has_a_deadline(sent: bytes) -> None:
    limits = PATIENT.model_copy(update={"connection_setup_timeout_ms": 30})
    async with relayed(limits=limits, proxy_networks=HERE) as (client, _, proxy):
        with contextlib.suppress(ConnectionError):  # a busy machine may be late with this already
            await client.send_raw(sent)
        assert await client.ended() == b""
        assert await proxy.closed_by("setup_timeout") == {"setup_timeout": 1}


async def test_only_load_balancers_may_connect(caplog: pytest.LogCaptureFixture) -> None:
    async with relayed(proxy_networks=(ip_network("192.0.2.0/24"),)) as (client, _, proxy):
        assert await client.ended() == b""
        assert proxy.metrics.rejected == {"listener.proxy.protocol.trusted.networks": 1}
    assert caplog.records[0].__dict__["client"].startswith("127.0.0.1:")


async def test_limits_count_the_clients_behind_a_load_balancer() -> None:
    limits = PATIENT.model_copy(update={"max_connections_per_address": 1})

    async def come_from(address: str, wire: Wire) -> None:
        await wire.send_raw(f"PROXY TCP4 {address} 10.0.0.1 5000 9092\r\n".encode() + frame(request(OPAQUE, 4, 1)))

    async with (
        FakeBroker() as broker,
        proxy_before(broker, limits=limits, proxy_networks=HERE) as proxy,
        connected(proxy.port) as one,
    ):
        await come_from("192.0.2.1", one)
        await (await broker.accepted()).receive()
        async with connected(proxy.port) as other:
            await come_from("192.0.2.2", other)
            await (await broker.accepted()).receive()
            async with connected(proxy.port) as same:
                await come_from("192.0.2.1", same)
                assert await same.ended() == b""
        assert proxy.metrics.rejected == {"limits.max.total.connections.per.address": 1}


async def test_tls_follows_the_header(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        FakeBroker() as broker,
        proxy_before(broker, tls=for_clients(authority), proxy_networks=HERE) as proxy,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(SEEN["v2 with fields"][0])
        await writer.drain()
        await writer.start_tls(client_side(authority), server_hostname="localhost")
        client = Wire(reader, writer)
        await client.send(request(OPAQUE, 4, 1))
        upstream = await broker.accepted()
        assert await upstream.receive() == request(OPAQUE, 4, 1)
        await upstream.send(response(1))
        assert await client.receive() == response(1)
        await client.close()
