"""A held port belongs to the process, and refuses connections until the process serves."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from proxy.process.start.held_ports import HeldPorts
from proxy.wire.server import bind
from tests.support.servers.ports import free_ports

HOST = "127.0.0.1"


def test_a_held_port_accepts_connections_when_it_is_opened() -> None:
    (port,) = free_ports(1)
    held = HeldPorts()
    held.hold(HOST, port, reuse_port=False)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))
    with closing(held.open(HOST, port, reuse_port=False)), socket.create_connection((HOST, port)):
        held.close()


def test_a_port_of_another_program_cannot_be_held() -> None:
    (port,) = free_ports(1)
    held = HeldPorts()
    with closing(bind(HOST, port, reuse_port=False)), pytest.raises(OSError, match=f"{port}: Address already in use"):
        held.hold(HOST, port, reuse_port=False)


def test_a_port_that_is_not_opened_is_released() -> None:
    (port,) = free_ports(1)
    held = HeldPorts()
    held.hold(HOST, port, reuse_port=False)
    held.close()
    bind(HOST, port, reuse_port=False).close()
