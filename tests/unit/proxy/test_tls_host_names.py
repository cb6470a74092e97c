"""Several certificates on one port, chosen by the client's host name; and the host name that a broker must prove."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from proxy.listener_config import ListenerTlsConfig
from proxy.wire.context import Address
from proxy.wire.tls import listener_tls
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, connected, request
from tests.support.proxy.proxy_harness import proxy_before
from tests.support.proxy.tls_sides import broker_side, for_brokers
from tests.support.servers.certificates import Authority
from tiers.broker.tls import TlsContext, client_context, monotonic_ms


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def of_names(
    authority: Authority,
    certificates: Sequence[dict[str, object]],
    clock_ms: Callable[[], int] = monotonic_ms,
    more: Mapping[str, object] | None = None,
) -> TlsContext:
    default = authority.identity("default", "default.example.org")
    config = ListenerTlsConfig.model_validate({"certificate": default, "certificates": certificates, **(more or {})})
    made = listener_tls(config)
    assert made is not None
    return TlsContext("the listener", made._build, made._files, clock_ms)


def three_names(authority: Authority) -> list[dict[str, object]]:
    return [
        {"names": ["*.example.org", "example.net"], "certificate": authority.identity("wild", "*.example.org")},
        {"names": ["One.Example.org"], "certificate": authority.identity("one", "one.example.org")},
    ]


def shown(port: int, name: str | None, authority: Authority, identity: Path | None = None) -> str:
    """Returns the host name of the certificate that a client gets for `name`."""
    context = client_context(authority.ca, identity, None, None, verifies_host_name=False)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=name) as tls,
    ):
        certificate = tls.getpeercert()
    assert certificate is not None
    (found,) = [value for key, value in certificate.items() if key == "subjectAltName"]
    return str(found[0][1])


async def test_the_certificate_is_that_of_the_host_that_the_client_names(authority: Authority) -> None:
    tls = of_names(authority, three_names(authority))
    async with FakeBroker() as broker, proxy_before(broker, tls=tls) as proxy:
        for name, host in (
            ("one.example.org", "one.example.org"),
            ("ONE.example.ORG", "one.example.org"),
            ("two.example.org", "*.example.org"),
            ("example.net", "*.example.org"),
            ("example.org", "default.example.org"),
            ("a.two.example.org", "default.example.org"),
            ("elsewhere", "default.example.org"),
            ("127.0.0.1", "default.example.org"),
            (None, "default.example.org"),
        ):
            assert await asyncio.to_thread(shown, proxy.port, name, authority) == host, name


async def test_client_certificates_are_required_under_every_host_name(authority: Authority) -> None:
    tls = of_names(authority, three_names(authority), more={"client.ca": authority.ca, "client.auth": "required"})
    known = authority.identity("client")
    async with FakeBroker() as broker, proxy_before(broker, tls=tls) as proxy:
        for name in ("one.example.org", "elsewhere"):
            await asyncio.to_thread(shown, proxy.port, name, authority, known)
            context = client_context(authority.ca, None, None, None, verifies_host_name=False)
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, ssl=context, server_hostname=name)
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert await reader.read(1) == b""
            writer.close()
        assert proxy.metrics.closed["tls_handshake"] == 2


async def test_a_changed_file_of_any_name_is_taken(authority: Authority, tmp_path: Path) -> None:
    now_ms = 0
    file = tmp_path / "one.pem"
    file.write_bytes(authority.identity("one", "one.example.org").read_bytes())
    tls = of_names(authority, [{"names": ["one.example.org"], "certificate": file}], lambda: now_ms)
    async with FakeBroker() as broker, proxy_before(broker, tls=tls) as proxy:
        assert await asyncio.to_thread(shown, proxy.port, "one.example.org", authority) == "one.example.org"
        file.write_bytes(authority.identity("one", "changed.example.org").read_bytes())
        now_ms += 5_000
        assert await asyncio.to_thread(shown, proxy.port, "one.example.org", authority) == "changed.example.org"
        assert await asyncio.to_thread(shown, proxy.port, "elsewhere", authority) == "default.example.org"


class NamedTlsBroker(FakeBroker):
    """Known as `localhost`; notes the names that it was asked for."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context)
        self.asked_for: list[str | None] = []
        context.sni_callback = lambda _, name, __: self.asked_for.append(name)

    @property
    def addresses(self) -> list[Address]:
        return [("localhost", self.port)]


async def test_a_broker_is_asked_for_by_its_name(authority: Authority) -> None:
    async with (
        NamedTlsBroker(broker_side(authority)) as broker,
        proxy_before(broker, upstream_tls=for_brokers(ca=authority.ca)) as proxy,
        connected(proxy.port) as wire,
    ):
        await wire.send(request(OPAQUE, 4, 1))
        assert await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)
        assert broker.asked_for == ["localhost"]
