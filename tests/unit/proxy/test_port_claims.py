"""The workers of one proxy share ports with each other, and with no other program."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing

import pytest

from proxy.process.start.port_claims import PortClaims, make_claims
from proxy.wire.server import bind
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.proxy.one_worker import one_worker
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.ports import free_ports

HOST = "127.0.0.1"


def test_two_proxies_do_not_share_a_port() -> None:
    (port,) = free_ports(1)
    with make_claims() as ours, make_claims() as theirs, closing(PortClaims(theirs.fileno()).open("a", HOST, port)):
        for _ in range(2):
            with pytest.raises(OSError, match=f"{port}: Address already in use"):
                PortClaims(ours.fileno()).open("a", HOST, port)


def test_a_port_of_another_program_is_refused_although_it_allows_sharing() -> None:
    (port,) = free_ports(1)
    with make_claims() as file, closing(bind(HOST, port, reuse_port=True)), pytest.raises(OSError, match="in use"):
        PortClaims(file.fileno()).open("a", HOST, port)


def test_a_worker_that_starts_again_finds_the_claims() -> None:
    (port,) = free_ports(1)
    with make_claims() as file:
        with (
            closing(PortClaims(file.fileno()).open("a", HOST, port)),
            closing(PortClaims(file.fileno()).open("a", HOST, port)),
        ):
            pass
        with closing(PortClaims(file.fileno()).open("a", HOST, port)):
            pass


def test_two_listeners_do_not_divide_the_workers_on_one_port() -> None:
    """The ports of their brokers overlap, and each worker met the brokers in another order."""
    (port,) = free_ports(1)
    with make_claims() as file:
        first, second = PortClaims(file.fileno()), PortClaims(file.fileno())
        with closing(first.open("a", HOST, port)):
            for other in (HOST, "0.0.0.0"):  # no address of a real port
                with pytest.raises(OSError, match=r"listener a of this proxy|in use"):
                    second.open("b", other, port)
            second.open("a", HOST, port).close()


def test_a_claim_of_a_port_holds_for_one_address() -> None:
    (port,) = free_ports(1)
    with make_claims() as file, closing(bind("127.0.0.2", port, reuse_port=True)):
        claims = PortClaims(file.fileno())
        with closing(claims.open("a", HOST, port)), pytest.raises(OSError, match="Address already in use"):
            claims.open("b", "127.0.0.2", port)


async def test_a_proxy_with_a_port_of_another_program_is_not_ready() -> None:
    bootstrap, taken = free_ports(2)
    async with AsyncExitStack() as stack:
        stack.enter_context(closing(bind(HOST, taken, reuse_port=True)))
        broker = await stack.enter_async_context(ScriptedBroker(1))
        config = parse_config(
            f"""
[upstream]
bootstrap.servers = "{HOST}:{broker.port}"
[listener]
host = "{HOST}"
bootstrap.port = {bootstrap}
base.port = {taken - 1}
"""
        )
        proxy = one_worker(config, stack)
        await proxy.open(stack)
        proxy.serve(stack)
        await proxy.topology.wait_until_ready()
        (reason,) = proxy.not_ready()
        assert proxy.not_serving() == [reason]
        await proxy.drain()
    assert reason.startswith(f"broker 1 has no listener: {HOST}:{taken}: Address already in use")
