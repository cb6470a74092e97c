"""A connection to a host with several addresses: each of them may refuse it, or not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from aiohappyeyeballs import AddrInfoType

from tiers.sockets import connected_to


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def refusing() -> Iterator[socket.socket]:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield closed


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """The queue of this listener is full, so that the kernel answers no further connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield full
        for each in waiting:
            each.close()


def address_of(sock: socket.socket) -> AddrInfoType:
    return socket.AF_INET, socket.SOCK_STREAM, 0, "", sock.getsockname()


@pytest.mark.parametrize("other", ["refusing", "silent"])
async def test_the_next_address_is_tried(other: str, listener: socket.socket, request: pytest.FixtureRequest) -> None:
    async with asyncio.timeout(60):
        sock = await connected_to([address_of(request.getfixturevalue(other)), address_of(listener)])
    with sock:
        assert sock.getpeername() == listener.getsockname()
        assert not sock.getblocking()


async def test_a_host_that_refuses_is_an_os_error(refusing: socket.socket) -> None:
    with pytest.raises(ConnectionRefusedError):
        await connected_to([address_of(refusing)] * 2)
