"""TLS on either side: bytes pass, certificates change while connections are open, and every mistake is one line."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest

from proxy.listener_config import ListenerTlsConfig
from proxy.wire.context import Address
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint
from proxy.wire.tls import listener_tls
from proxy.wire.upstream import UpstreamConnection
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, connected, request, response
from tests.support.proxy.proxy_harness import proxy_before
from tests.support.proxy.tls_sides import (
    HangingTlsBroker,
    broker_side,
    client_side,
    connected_by_tls,
    for_brokers,
    for_clients,
)
from tests.support.servers.certificates import Authority
from tiers.broker.tls import TlsContext, TlsError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


class PlainBroker(FakeBroker):
    """Says to everybody what is no TLS."""

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await super()._on_connection(reader, writer)
        writer.write(b"\x00\x00\x00\x04no, not")


class NamedTlsBroker(FakeBroker):
    """Known as `localhost`; notes the names that it was asked for."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context)
        self.asked_for: list[str | None] = []
        context.sni_callback = lambda _, name, __: self.asked_for.append(name)

    @property
    def addresses(self) -> list[Address]:
        return [("localhost", self.port)]


async def test_frames_of_every_size_pass_between_tls_and_tls(authority: Authority) -> None:
    async with (
        FakeBroker(broker_side(authority)) as broker,
        proxy_before(broker, tls=for_clients(authority), upstream_tls=for_brokers(ca=authority.ca)) as proxy,
        connected_by_tls(proxy.port, client_side(authority)) as wire,
    ):
        for number, size in enumerate((0, 1, 70_000, 3_000_000)):
            body = os.urandom(size)
            sending = asyncio.create_task(wire.send(request(OPAQUE, 4, number, body)))
            if not number:
                upstream = await broker.accepted()
            assert await upstream.receive() == request(OPAQUE, 4, number, body)
            await sending
            answering = asyncio.create_task(upstream.send(response(number, body[::-1])))
            assert await wire.receive() == response(number, body[::-1])
            await answering


async def test_a_client_that_takes_nothing_stops_the_broker_under_tls_too(authority: Authority) -> None:
    size = 64 * 1024 * 1024
    async with (
        FakeBroker() as broker,
        proxy_before(broker, tls=for_clients(authority)) as proxy,
        connected_by_tls(proxy.port, client_side(authority)) as wire,
    ):
        await wire.send(request(OPAQUE, 4, 1))
        upstream = await broker.accepted()
        sending = asyncio.create_task(upstream.send(response(1, bytes(size))))
        before = -1
        while before != proxy.metrics.bytes_from_brokers:
            before = proxy.metrics.bytes_from_brokers
            await asyncio.sleep(0.2)
        assert before < size / 2
        assert await wire.receive() == response(1, bytes(size))
        await sending


async def test_a_client_must_show_a_certificate_where_one_is_required(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = for_clients(authority, **{"client.ca": authority.ca, "client.auth": "required"})
    async with FakeBroker() as broker, proxy_before(broker, tls=tls) as proxy:
        async with connected_by_tls(proxy.port, client_side(authority, authority.identity("client"))) as wire:
            await wire.send(request(OPAQUE, 4, 1))
            assert await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)
        async with connected_by_tls(proxy.port, client_side(authority)) as wire:
            with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
                await wire.receive_raw(1)
        assert broker.connections_made == 1
    assert [record.message for record in caplog.records] == [
        "a client failed the TLS handshake: "
        "the client sent no certificate, and client.auth of [listener.tls] requires one"
    ]


async def test_plain_text_on_a_tls_port_is_one_line_and_never_reaches_a_broker(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeBroker() as broker, proxy_before(broker, tls=for_clients(authority)) as proxy:
        async with connected(proxy.port) as wire:
            await wire.send(request(18, 0, 1))
            await wire.ended()
        async with connected(proxy.port):
            pass  # a port check says nothing, and nothing is said of it
        assert broker.connections_made == 0
    assert len(caplog.records) == 1
    assert "a client speaks plain text on this TLS port" in caplog.records[0].message


async def test_a_broker_without_tls_or_of_a_stranger_is_named(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the result of an attempt to connect. No attempt is cut short."""
    one_attempt = Limits(connect_timeout_ms=60_000, connect_deadline_ms=60_000)
    misnamed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    misnamed.load_cert_chain(authority.identity("elsewhere", "elsewhere.example.org"))
    for each, said in (
        (PlainBroker(), "it does not speak TLS"),
        (FakeBroker(broker_side(Authority(tmp_path))), "is not accepted: unable to get local issuer certificate"),
        (FakeBroker(misnamed), "its certificate is not accepted: IP address mismatch"),
    ):
        caplog.clear()
        async with (
            each as broker,
            proxy_before(broker, upstream_tls=for_brokers(ca=authority.ca), limits=one_attempt) as proxy,
            connected(proxy.port) as wire,
        ):
            await wire.send(request(OPAQUE, 4, 1))
            assert await wire.ended() == b""
        assert said in caplog.records[0].message
    tls = for_brokers(ca=authority.ca, **{"verify.host.name": False})
    async with (
        FakeBroker(misnamed) as broker,
        proxy_before(broker, upstream_tls=tls) as proxy,
        connected(proxy.port) as wire,
    ):
        await wire.send(request(OPAQUE, 4, 1))
        assert await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)


def served_by(port: int, trusted: Authority) -> bool:
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            client_side(trusted).wrap_socket(plain, server_hostname="localhost"),
        ):
            return True
    except ssl.SSLCertVerificationError:
        return False


async def test_a_changed_certificate_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms = 0
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    file = old.identity("proxy")
    config = ListenerTlsConfig.model_validate({"certificate": file})
    made = listener_tls(config)
    assert made is not None
    tls = TlsContext("the listener", made._build, [file], lambda: now_ms)
    async with (
        FakeBroker() as broker,
        proxy_before(broker, tls=tls) as proxy,
        connected_by_tls(proxy.port, client_side(old)) as wire,
    ):
        file.write_text("half of a cert")
        now_ms += 5_000
        assert tls.trouble.startswith("the listener "), "it is known before a client connects"
        for _ in range(3):
            assert await asyncio.to_thread(served_by, proxy.port, old)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "changed certificates cannot be used, the old ones stay" in caplog.records[0].message

        file.write_bytes(new.identity("proxy").read_bytes())
        now_ms += 5_000
        assert tls.trouble == ""
        assert await asyncio.to_thread(served_by, proxy.port, new)
        assert not await asyncio.to_thread(served_by, proxy.port, old)

        await wire.send(request(OPAQUE, 4, 1))
        assert await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    mine, other = authority.identity("a"), authority.identity("b")
    text = tmp_path / "text"
    text.write_text("hello")
    for settings, said in (
        ({"certificate": tmp_path / "none"}, f"[listener.tls] certificate: {tmp_path}/none: No such file or directory"),
        ({"certificate": text}, "hold no certificate and key in PEM form"),
        ({"certificate": mine, "key": tmp_path / "none"}, f"[listener.tls] key: {tmp_path}/none: No such file"),
        ({"certificate": mine, "key": other}, "the key does not match the certificate"),
        (
            {"certificate": mine, "client.ca": text, "client.auth": "required"},
            f"client.ca: {text}: holds no certificate in PEM form",
        ),
    ):
        with pytest.raises(TlsError) as raised:
            listener_tls(ListenerTlsConfig.model_validate(settings))
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)


async def test_a_cancelled_opening_of_tls_does_not_wait_for_the_broker(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop itself would wait for 30 s for the broker's end of TLS."""
    made = UpstreamConnection.connection_made
    async with (
        HangingTlsBroker(authority) as hanging,
        FakeBroker() as broker,
        proxy_before(broker, upstream_tls=for_brokers(ca=authority.ca)) as proxy,
    ):

        def made_and_aborted(upstream: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
            made(upstream, transport)
            (connection,) = proxy.server.connections
            connection.abort("client")

        monkeypatch.setattr(UpstreamConnection, "connection_made", made_and_aborted)
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(2, lambda: [("127.0.0.1", hanging.port)]))
        async with connected(port) as client:
            await client.send(request(OPAQUE, 4, 1))
            async with asyncio.timeout(20):
                await hanging.ended.wait()


async def test_the_end_of_an_opening_that_failed_ends_no_client(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline passes in the turn in which the opening is complete. The client then has the broker's next address."""
    made, timeout = UpstreamConnection.connection_made, asyncio.timeout
    timeouts: list[asyncio.Timeout] = []

    def noted(delay_s: float) -> asyncio.Timeout:
        timeouts.append(timeout(delay_s))
        return timeouts[-1]

    def made_too_late(upstream: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
        made(upstream, transport)
        if transport.get_extra_info("peername")[1] == hanging.port:
            timeouts[-1].reschedule(0)

    async with (
        HangingTlsBroker(authority) as hanging,
        FakeBroker(broker_side(authority)) as broker,
        proxy_before(broker, upstream_tls=for_brokers(ca=authority.ca)) as proxy,
    ):
        addresses = [("127.0.0.1", hanging.port), *broker.addresses]
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(2, lambda: addresses))
        async with connected(port) as client:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "timeout", noted)
                patch.setattr(UpstreamConnection, "connection_made", made_too_late)
                await client.send(request(OPAQUE, 4, 1))
                upstream = await broker.accepted()
            await hanging.ended.wait()
            await upstream.send(response(1))
            assert await client.receive() == response(1)


async def test_an_address_without_a_host_name_is_passed_over(authority: Authority) -> None:
    async with (
        FakeBroker(broker_side(authority)) as broker,
        proxy_before(broker, upstream_tls=for_brokers(ca=authority.ca)) as proxy,
    ):
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(2, lambda: [("", 1), *broker.addresses]))
        async with connected(port) as client:
            await client.send(request(OPAQUE, 4, 1))
            assert await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)


async def test_a_broker_is_asked_for_by_its_name(authority: Authority) -> None:
    async with (
        NamedTlsBroker(broker_side(authority)) as broker,
        proxy_before(broker, upstream_tls=for_brokers(ca=authority.ca)) as proxy,
        connected(proxy.port) as wire,
    ):
        await wire.send(request(OPAQUE, 4, 1))
        assert await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)
        assert broker.asked_for == ["localhost"]
