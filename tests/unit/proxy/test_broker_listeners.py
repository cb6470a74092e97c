"""The addresses of each listener, and one port for all brokers by the host name in the TLS handshake."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Network

import pytest

from proxy.cluster.broker_listeners import BrokerListeners, ListenerAddresses, shared_ports
from proxy.metrics import ProxyMetrics
from proxy.wire.context import Address, Endpoint, Router
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint, Entrance, ProxyServer, bind
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, TIMEOUT_S, Wire, frame, request, response
from tests.support.proxy.tls_sides import for_clients
from tests.support.servers.certificates import Authority
from tiers.broker.tls import TlsContext, client_context

BY_SNI = ListenerAddresses("127.0.0.1", "Broker-{id}.kafka.example.org", 9092, None)
NAMES = ("*.kafka.example.org", "kafka.example.org")


def listeners(
    addresses: ListenerAddresses, listen: Callable[[str, int, Endpoint], object], brokers: dict[int, Sequence[Address]]
) -> BrokerListeners:
    every = [address for each in brokers.values() for address in each]
    return BrokerListeners(addresses, listen, lambda node_id: brokers.get(node_id, ()), lambda: every, lambda: None)


@pytest.mark.parametrize(
    ("addresses", "advertised"),
    [
        (ListenerAddresses("0.0.0.0", "proxy", 9092, 9100), ("proxy", 9103)),
        (ListenerAddresses("0.0.0.0", "proxy", 9092, 9100, advertised_base_port=32_000), ("proxy", 32_003)),
        (ListenerAddresses("0.0.0.0", "b{id}.org", 9092, 9100), ("b3.org", 9103)),
        (ListenerAddresses("0.0.0.0", "b{id}.org", 9092, 9100, advertised_port=443), ("b3.org", 443)),
        (ListenerAddresses("0.0.0.0", "b{id}.org", 9092, None), ("b3.org", 9092)),
        (ListenerAddresses("0.0.0.0", "b{id}.org", 9092, None, advertised_port=443), ("b3.org", 443)),
    ],
)
def test_a_broker_is_advertised_as_the_listener_says(addresses: ListenerAddresses, advertised: Address) -> None:
    assert addresses.advertised(3) == advertised
    assert addresses.trouble_of(3 if addresses.base_port else 2**31 - 1) is None


@pytest.mark.parametrize(
    ("advertised_base_port", "node_id", "trouble"),
    [
        (None, 65_534, "port 74634 does not exist: lower listener.base.port to 1 or less"),
        (65_000, 536, "port 65536 does not exist: lower listener.advertised.base.port to 64999 or less"),
        (65_000, 65_535, "port 74635 does not exist, and no listener.base.port fits node id 65535"),
    ],
)
def test_a_port_that_does_not_exist_is_named_with_a_way_that_works(
    advertised_base_port: int | None, node_id: int, trouble: str
) -> None:
    addresses = ListenerAddresses("0.0.0.0", "proxy", 9092, 9100, advertised_base_port)
    said = str(addresses.trouble_of(node_id))
    assert said.startswith(trouble)
    assert said.endswith('set listener.brokers.by = "sni"')


@pytest.mark.parametrize(
    ("name", "node_id"),
    [
        ("broker-0.kafka.example.org", 0),
        ("broker-2147483647.kafka.example.org", 2**31 - 1),
        ("broker-2147483648.kafka.example.org", None),
        ("broker-07.kafka.example.org", None),
        ("broker--7.kafka.example.org", None),
        ("broker-7.kafka.example.org.evil.org", None),
        ("broker-7xkafka.example.org", None),
        ("broker-.kafka.example.org", None),
        ("kafka.example.org", None),
        (None, None),
    ],
)
def test_a_name_stands_for_a_broker_or_for_none(name: str | None, node_id: int | None) -> None:
    assert BY_SNI.node_named(name) == node_id


def test_each_listener_has_addresses_of_its_own() -> None:
    opened: list[tuple[int, int | None]] = []

    def listen(host: str, port: int, endpoint: Endpoint) -> None:
        opened.append((port, endpoint.node_id))

    brokers: dict[int, Sequence[Address]] = {1: [("a", 9)]}
    inside = listeners(ListenerAddresses("0.0.0.0", "inside", 9092, 9100), listen, brokers)
    outside = listeners(BY_SNI, listen, brokers)
    for each in (inside, outside):
        each.listen_for_bootstrap()
        each.follow([1])
    assert opened == [(9092, None), (9101, 1), (9092, None)]
    assert inside.advertised_address(1) == ("inside", 9101)
    assert outside.advertised_address(1) == ("Broker-1.kafka.example.org", 9092)
    # An answer names a broker that joined a moment ago.
    assert inside.advertised_address(2) == ("inside", 9102)
    assert outside.advertised_address(2) == ("Broker-2.kafka.example.org", 9092)
    assert opened[3:] == [(9102, 2)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


class NamedBroker(FakeBroker):
    """Answers every request with its node id."""

    def __init__(self, node_id: int) -> None:
        super().__init__()
        self.node_id = node_id

    async def serve(self, wire: Wire) -> None:
        while True:
            await wire.receive()
            await wire.send(response(7, bytes([self.node_id])))


class Rig:
    """One port for two brokers. Others may join."""

    def __init__(
        self,
        server: ProxyServer,
        brokers: Sequence[NamedBroker],
        tls: TlsContext,
        proxy_networks: Sequence[IPv4Network] = (),
    ) -> None:
        self.known = {broker.node_id: broker.addresses for broker in brokers}
        self.port = 0
        self.woken = 0

        def listen(host: str, port: int, endpoint: Endpoint) -> None:
            self.port = server.listen(host, 0, endpoint, Entrance(tls, proxy_networks))[1]

        self.listeners = BrokerListeners(BY_SNI, listen, self._addresses, lambda: brokers[0].addresses, lambda: None)
        self.listeners.listen_for_bootstrap()

    def _addresses(self, node_id: int) -> Sequence[Address]:
        return self.known.get(node_id, ())

    async def reached(
        self, context: ssl.SSLContext, name: str | None, session: ssl.SSLSession | None = None, header: bytes = b""
    ) -> tuple[int | None, ssl.SSLSession | None]:
        """Returns the broker that answers, and the TLS session. None: the proxy closed the connection.

        The client sends `header` before the handshake."""

        def ask() -> tuple[int | None, ssl.SSLSession | None]:
            with ExitStack() as stack:
                plain = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S))
                plain.sendall(header)
                tls = stack.enter_context(context.wrap_socket(plain, server_hostname=name, session=session))
                assert tls.session_reused == (session is not None)
                tls.sendall(frame(request(OPAQUE, 0, 7, b"x")))
                answer = tls.recv(9)
                return (answer[8] if answer else None), tls.session

        return await asyncio.to_thread(ask)


@pytest.fixture
async def rig(authority: Authority) -> AsyncIterator[Rig]:
    async with NamedBroker(1) as one, NamedBroker(2) as two:
        tls = for_clients(authority, certificate=authority.identity("proxy", *NAMES))
        async with ProxyServer(Router(), Limits(), ProxyMetrics()) as server:
            yield Rig(server, [one, two], tls)


def of_client(authority: Authority, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = client_context(authority.ca, None, None, None, verifies_host_name=False)
    context.maximum_version = newest
    return context


async def test_the_name_in_the_handshake_leads_to_the_broker(rig: Rig, authority: Authority) -> None:
    context = of_client(authority)
    for name, node_id in (
        ("broker-1.kafka.example.org", 1),
        ("broker-2.kafka.example.org", 2),
        ("BROKER-2.kafka.example.org", 2),
        ("kafka.example.org", 1),
        ("elsewhere", 1),
        ("127.0.0.1", 1),
        (None, 1),
    ):
        assert (await rig.reached(context, name))[0] == node_id, name


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_names_its_broker_again(rig: Rig, authority: Authority, newest: ssl.TLSVersion) -> None:
    context = of_client(authority, newest)
    _, session = await rig.reached(context, "broker-2.kafka.example.org")
    assert session is not None
    assert (await rig.reached(context, "broker-2.kafka.example.org", session))[0] == 2


async def test_a_client_that_names_an_unknown_broker_is_refused(rig: Rig, authority: Authority) -> None:
    assert (await rig.reached(of_client(authority), "broker-3.kafka.example.org"))[0] is None


@pytest.mark.parametrize(("name", "node_id"), [("broker-2.kafka.example.org", 2), ("kafka.example.org", 1)])
async def test_a_load_balancers_header_comes_before_the_name(authority: Authority, name: str, node_id: int) -> None:
    header = b"PROXY TCP4 192.0.2.7 10.0.0.1 5000 9092\r\n"
    async with NamedBroker(1) as one, NamedBroker(2) as two:
        tls = for_clients(authority, certificate=authority.identity("proxy", *NAMES))
        async with ProxyServer(Router(), Limits(), ProxyMetrics()) as server:
            rig = Rig(server, [one, two], tls, [IPv4Network("127.0.0.0/8")])
            assert (await rig.reached(of_client(authority), name, header=header))[0] == node_id


async def test_two_listeners_of_a_proxy_never_share_a_port() -> None:
    shared = Entrance(open_port=partial(bind, reuse_port=True))
    endpoint = BrokerEndpoint(1, lambda: ())
    async with ProxyServer(Router(), Limits(), ProxyMetrics()) as server:
        _, port = server.listen("127.0.0.1", 0, endpoint, shared)
        with pytest.raises(OSError, match="another listener of this proxy"):
            server.listen("127.0.0.1", port, endpoint, shared)


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(OSError, match=r"a\.b\.invalid:9092: "):
        bind("a.b.invalid", 9092, reuse_port=False)


def test_ports_that_two_listeners_need_are_named() -> None:
    first = ListenerAddresses("0.0.0.0", "inside", 9092, 9100)  # no address is bound
    second = ListenerAddresses("127.0.0.1", "outside", 9101, 9102)
    found = list(shared_ports([first, second], [0, 1, 2], ("127.0.0.1", 9103)))
    assert [line.removesuffix(": change the ports of one of them") for line in found] == [
        "port 9101 is broker 1 at 0.0.0.0:9092 and the bootstrap port of 127.0.0.1:9101",
        "port 9102 is broker 2 at 0.0.0.0:9092 and broker 0 at 127.0.0.1:9101",
        "port 9103 is admin.port and broker 1 at 127.0.0.1:9101",
    ]
    by_sni = ListenerAddresses("127.0.0.1", "b-{id}", 9093, None)
    elsewhere = ListenerAddresses("127.0.0.2", "outside", 9101, 9102)
    assert list(shared_ports([second, by_sni, elsewhere], [0, 1, 2])) == []
