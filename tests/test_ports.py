"""No two servers of the tests get the same port."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.support.servers import ports
from tests.support.servers.ports import PORTS, consecutive_free_ports, free_ports

ANOTHER_PROCESS = """
import sys
from tests.support.servers import ports
ports.PORTS = range(32_000, 32_700)  # nobody else's
print(*ports.free_ports(1), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes that port the next one to be looked at."""

    def first(port: int) -> None:
        offered = itertools.chain([port], (random.choice(PORTS) for _ in itertools.count()))
        monkeypatch.setattr(ports, "random", SimpleNamespace(choice=lambda _: next(offered)))

    return first


def test_a_port_is_given_once_though_nothing_listens_on_it_yet(offer: Callable[[int], None]) -> None:
    (given,) = free_ports(1)
    offer(given)
    assert free_ports(1) != [given]
    offer(given - 1)
    assert consecutive_free_ports(2) != given - 1


def test_a_port_on_which_something_listens_is_not_given(offer: Callable[[int], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        offer(port)
        assert free_ports(1) != [port]


def test_a_port_of_another_process_is_free_when_that_process_ends(offer: Callable[[int], None]) -> None:
    command, pipe = [sys.executable, "-c", ANOTHER_PROCESS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        offer(theirs)
        assert free_ports(1) != [theirs]
        other.communicate("")
    offer(theirs)
    assert free_ports(1) == [theirs]
