"""`BrokerListeners`: one listener of the settings, with the places at which clients reach each broker through it.

A listener has an address to bind, a pattern of advertised addresses, and a way to name brokers:

* By port: each broker has a port of its own, base port + node id. Another port is for bootstrapping.
* By SNI: all brokers share the bootstrap port. The host name in the client's TLS handshake names the broker. A client
  with another name, or without one, reaches any broker, as on a bootstrap port.

The node ids stay those of the cluster.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.addresses import AddressOf
from proxy.wire.context import Address, Endpoint
from proxy.wire.server import BrokerEndpoint, named_in_errors

logger = logging.getLogger(__name__)

Listen = Callable[[str, int, Endpoint], object]
"""Binds a host and a port, and sends clients to the endpoint. Raises `OSError`."""
MAX_PORT: Final = 65_535
BOOTSTRAP_PORT: Final = "[listener] bootstrap.port"
NODE_ID: Final = "{id}"
_MAX_NODE_ID = 2**31 - 1
_DISCARD_PORT = 9
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # they are compared, and not bound


@dataclass(frozen=True, slots=True)
class ListenerAddresses:
    """`host` is the address to bind. `advertised_host` is the one that clients get, `{id}` in it is the node id.

    `base_port` None: the brokers share the bootstrap port, by SNI. `advertised_port` is the same for all brokers. If it
    is None, the advertised port is `advertised_base_port` + node id, whose default is the bound port."""

    host: str
    advertised_host: str
    bootstrap_port: int
    base_port: int | None
    advertised_base_port: int | None = None
    advertised_port: int | None = None

    @property
    def name(self) -> str:
        """What messages call the listener."""
        return f"{self.host}:{self.bootstrap_port}"

    def advertised(self, node_id: int) -> Address:
        host = self.advertised_host.replace(NODE_ID, str(node_id))
        if self.advertised_port is not None:
            return host, self.advertised_port
        base_port = self.base_port if self.advertised_base_port is None else self.advertised_base_port
        return host, self.bootstrap_port if base_port is None else base_port + node_id

    def trouble_of(self, node_id: int) -> str | None:
        """Returns why the settings leave no address for a broker. None: they have one."""
        bound = None if self.base_port is None else self.base_port + node_id
        if bound is not None and bound > MAX_PORT:
            return _no_port(bound, node_id, "listener.base.port")
        if bound == self.bootstrap_port:
            return f"port {bound} is listener.bootstrap.port: change that setting or listener.base.port"
        advertised = self.advertised(node_id)[1]
        if advertised > MAX_PORT:
            return _no_port(advertised, node_id, "listener.advertised.base.port")
        return None

    def node_named(self, server_name: str | None) -> int | None:
        """Returns the node id in a host name that a client sent. None: the name is no broker's."""
        pattern = re.escape(self.advertised_host.lower().rstrip(".")).replace(re.escape(NODE_ID), "(0|[1-9][0-9]{0,9})")
        found = None if server_name is None else re.fullmatch(pattern, server_name)
        node_id = None if found is None else int(found[1])
        return node_id if node_id is None or node_id <= _MAX_NODE_ID else None


def _no_port(port: int, node_id: int, base: str) -> str:
    by_sni = 'set listener.brokers.by = "sni"'
    highest_base = MAX_PORT - node_id
    if highest_base < 1:
        return f"port {port} does not exist, and no {base} fits node id {node_id}: {by_sni}"
    return f"port {port} does not exist: lower {base} to {highest_base} or less, or {by_sni}"


def shared_ports(
    listeners: Sequence[ListenerAddresses], node_ids: Collection[int], admin: Address | None = None
) -> Iterator[str]:
    """Yields the ports that two listeners, or a listener and the admin port, both need, one line each.

    The ports of one listener are compared in `ListenerAddresses.trouble_of`."""
    uses = [] if admin is None else [(*admin, "admin.port", -1)]
    for number, each in enumerate(listeners):
        uses.append((each.host, each.bootstrap_port, f"the bootstrap port of {each.name}", number))
        if each.base_port is not None:
            uses += [(each.host, each.base_port + id_, f"broker {id_} at {each.name}", number) for id_ in node_ids]
    known: dict[int, list[tuple[str, str, int]]] = {}
    for host, port, use, number in uses:
        for other_host, other_use, other_number in known.setdefault(port, []):
            if number != other_number and (host == other_host or not _EVERYWHERE.isdisjoint((host, other_host))):
                yield f"port {port} is {other_use} and {use}: change the ports of one of them"
        known[port].append((host, use, number))


class BrokerListeners:
    """`addresses_of` returns the addresses of a broker, and `any_broker` those of all of them.

    `on_unknown` is called when a client is told of a broker that has no listener yet."""

    def __init__(
        self,
        addresses: ListenerAddresses,
        listen: Listen,
        addresses_of: Callable[[int], Sequence[Address]],
        any_broker: Callable[[], Sequence[Address]],
        on_unknown: Callable[[], None],
    ) -> None:
        self.addresses = addresses
        self._listen = listen
        self._addresses_of = addresses_of
        self._any_broker = any_broker
        self._on_unknown = on_unknown
        self._open: set[int] = set()
        self._unserved: dict[int, str] = {}
        """By node id: why clients cannot reach the broker."""
        self._address_of: AddressOf = self.advertised_address

    @property
    def unserved(self) -> list[str]:
        """The brokers that clients cannot reach through this listener, one line each."""
        return [f"broker {node_id} has no listener: {reason}" for node_id, reason in sorted(self._unserved.items())]

    def listen_for_bootstrap(self) -> None:
        """Binds the bootstrap port. Raises `OSError`."""
        bootstrap = BrokerEndpoint(None, self._any_broker, self._address_of)
        by_sni = self.addresses.base_port is None
        endpoint = NamedEndpoint(bootstrap, self._named) if by_sni else bootstrap
        with named_in_errors(BOOTSTRAP_PORT):
            self._listen(self.addresses.host, self.addresses.bootstrap_port, endpoint)

    def _named(self, server_name: str | None) -> Endpoint | None:
        node_id = self.addresses.node_named(server_name)
        return None if node_id is None else self._endpoint(node_id)

    def _endpoint(self, node_id: int) -> BrokerEndpoint:
        return BrokerEndpoint(node_id, lambda: self._addresses_of(node_id), self._address_of)

    def follow(self, brokers: Collection[int]) -> None:
        """Opens the listeners of new brokers, and those that could not be opened before."""
        self._unserved = {node_id: why for node_id, why in self._unserved.items() if node_id in brokers}
        for node_id in brokers:
            self._listen_for(node_id)

    def serves(self, node_id: int) -> bool:
        return node_id in self._open

    def _listen_for(self, node_id: int) -> None:
        if node_id in self._open:
            return
        addresses = self.addresses
        port = addresses.bootstrap_port if addresses.base_port is None else addresses.base_port + node_id
        try:
            if (trouble := addresses.trouble_of(node_id)) is not None:
                raise OSError(trouble)
            if addresses.base_port is not None:
                self._listen(addresses.host, port, self._endpoint(node_id))
        except OSError as error:
            reason = error.strerror or str(error)
            if self._unserved.get(node_id) != reason:
                self._unserved[node_id] = reason
                logger.error(
                    "the listener for broker %d cannot be opened: %s",
                    node_id, reason,
                    extra={"node_id": node_id, "port": port},
                )  # fmt: skip
            return
        self._open.add(node_id)
        if self._unserved.pop(node_id, None) is not None:
            logger.info("the listener for a broker is open now", extra={"node_id": node_id, "port": port})

    def advertised_address(self, node_id: int) -> Address:
        """Returns the address at which clients reach the broker. Opens a listener for a new node.

        If the port cannot be bound, a stranger may serve it. Clients then get a name that has no address."""
        if node_id not in self._open and node_id not in self._unserved:
            self._listen_for(node_id)
            self._on_unknown()
        if node_id in self._unserved:
            return f"broker-{node_id}-has-no-listener.invalid", _DISCARD_PORT
        return self.addresses.advertised(node_id)


@dataclass(frozen=True, slots=True)
class NamedEndpoint:
    """The endpoint of a port that several brokers share. A client whose name is no broker's reaches `bootstrap`."""

    bootstrap: BrokerEndpoint
    broker: Callable[[str | None], Endpoint | None]

    @property
    def node_id(self) -> int | None:
        return None

    @property
    def address_of(self) -> AddressOf:
        return self.bootstrap.address_of

    def addresses(self) -> Sequence[Address]:
        return self.bootstrap.addresses()

    def named(self, server_name: str | None) -> Endpoint:
        return self.broker(server_name) or self.bootstrap
