"""The part of `tidegate check` about the ports that `tidegate serve` will bind, and the host that clients are told."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from proxy.cluster.broker_listeners import BOOTSTRAP_PORT, ListenerAddresses
from proxy.config import TidegateConfig, is_loopback
from proxy.listener_config import ListenerConfig
from proxy.process.app import listener_addresses
from proxy.wire.server import bind


def taken_ports(config: TidegateConfig, node_ids: Collection[int]) -> Iterator[str]:
    """Binds the ports that `tidegate serve` will bind, and yields those that it cannot bind, one line each."""
    for listener in config.listener:
        for what, port in _ports(listener_addresses(listener), node_ids):
            yield from _trouble(what, listener.host, port, reuse_port=listener.reuse_port)
    if config.admin.port:
        yield from _trouble("[admin] port", config.admin.host, config.admin.port, reuse_port=False)


def _ports(addresses: ListenerAddresses, node_ids: Collection[int]) -> Iterator[tuple[str, int]]:
    yield BOOTSTRAP_PORT, addresses.bootstrap_port
    if addresses.base_port is not None:
        for node_id in sorted(node_ids):
            if addresses.trouble_of(node_id) is None:
                yield f"[listener] base.port: broker {node_id}", addresses.base_port + node_id


def _trouble(what: str, host: str, port: int, *, reuse_port: bool) -> Iterator[str]:
    try:
        bind(host, port, reuse_port=reuse_port, listens=False).close()
    except OSError as error:
        yield f"{what}: {error.strerror or error}: free the port, or change the setting"


def advertised_problems(listeners: Sequence[ListenerConfig]) -> Iterator[str]:
    """Yields a line for each listener that sends the clients of other machines to themselves."""
    for listener in listeners:
        if "advertised_host" not in listener.model_fields_set and not is_loopback(listener.host):
            yield (
                f"[listener] {listener.name}: there is no advertised.host, so clients are told to connect to"
                f" {listener.advertised_host}: set it to the name of this machine, or to localhost if all clients run"
                " here"
            )
