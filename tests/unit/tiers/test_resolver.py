"""Connections to names: one look-up for all, addresses that outlast a resolver, and each address is tried."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from aiohappyeyeballs import AddrInfoType

from tests.support.fakes.hanging_names import HANGING, KNOWN, hanging_names
from tests.support.simulation.loop import VirtualLoop
from tiers.event_loop import MAX_LOOK_UPS, EventLoop
from tiers.sockets import (
    KEPT_S,
    MAX_NAMES,
    PATIENCE_S,
    Addresses,
    Question,
    Resolver,
    connected_socket,
    connected_to,
)

BROKER = Question("broker-1.example", 9092)
LOOK_UP_S = 0.033
HANGS_S = 30.0
OLD: Addresses = ["old"]
NEW: Addresses = ["new"]


class Names:
    """The name service. Each look-up has the next of the answers; the last one stays."""

    def __init__(self, *answers: Addresses | Exception) -> None:
        self.answers = list(answers)
        self.takes_s = LOOK_UP_S
        self.look_ups = 0
        self.resolver = Resolver(self._look_up)

    async def _look_up(self, asked: Question) -> Addresses:
        self.look_ups += 1
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        await asyncio.sleep(self.takes_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def resolve(self, times: int = 1) -> list[Addresses | type[BaseException]]:
        """Asks so many times at once. Returns the addresses, or the types of the errors."""
        asking = (self.resolver.resolve(BROKER) for _ in range(times))
        answers = await asyncio.gather(*asking, return_exceptions=True)
        return [type(each) if isinstance(each, BaseException) else each for each in answers]


Scenario = Callable[[], Coroutine[Any, Any, None]]


def virtual(scenario: Scenario) -> Callable[[], None]:
    """Runs the test in virtual time."""

    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(scenario())
        finally:
            loop.close()

    return run


def error(code: int) -> socket.gaierror:
    return socket.gaierror(code, "no answer")


@virtual
async def test_all_who_wait_share_a_look_up_and_use_it_for_a_time() -> None:
    names = Names(OLD, NEW)
    assert await names.resolve(1_000) == [OLD] * 1_000
    await asyncio.sleep(KEPT_S - 0.1)
    assert (await names.resolve(), names.look_ups) == ([OLD], 1)
    await asyncio.sleep(0.1)
    assert await names.resolve() == [NEW]


@virtual
async def test_a_look_up_that_fails_leaves_the_former_addresses() -> None:
    names = Names(error(socket.EAI_AGAIN), OLD, error(socket.EAI_AGAIN), TimeoutError(), NEW)
    assert await names.resolve(2) == [socket.gaierror] * 2
    for expected in (OLD, OLD, OLD, NEW):
        assert await names.resolve() == [expected]
        await asyncio.sleep(KEPT_S)
    assert names.look_ups == 5


@virtual
async def test_a_look_up_that_hangs_holds_up_known_names_once_and_briefly() -> None:
    names, now_s = Names(OLD, NEW), asyncio.get_running_loop().time
    await names.resolve()
    await asyncio.sleep(KEPT_S)
    names.takes_s, began_s = HANGS_S, now_s()
    for _ in range(2):
        assert await names.resolve() == [OLD]
        assert now_s() - began_s == pytest.approx(PATIENCE_S)
    await asyncio.sleep(HANGS_S)
    assert (await names.resolve(), names.look_ups) == ([NEW], 2)


@virtual
async def test_a_name_that_exists_no_more_loses_its_addresses() -> None:
    names = Names(OLD, error(socket.EAI_NONAME), error(socket.EAI_AGAIN))
    await names.resolve()
    await asyncio.sleep(KEPT_S)
    for _ in range(2):
        assert await names.resolve() == [socket.gaierror]


@virtual
async def test_a_caller_that_leaves_ends_no_look_up() -> None:
    names = Names(NEW)
    async with asyncio.TaskGroup() as group:
        first, second = (group.create_task(names.resolve()) for _ in range(2))
        await asyncio.sleep(LOOK_UP_S / 2)
        first.cancel()
    assert (second.result(), names.look_ups) == ([NEW], 1)


@virtual
async def test_names_take_bounded_memory() -> None:
    names = Names(OLD)
    names.takes_s = 0
    for number in (*range(MAX_NAMES + 2), 0):
        await names.resolver.resolve(Question(f"broker-{number}.example", 9092))
    assert names.look_ups == MAX_NAMES + 3


@pytest.mark.parametrize(("host", "look_ups"), [("127.0.0.1", 0), (KNOWN, 1)])
def test_a_connection_waits_for_no_look_up_of_another_name(host: str, look_ups: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with hanging_names() as names, socket.create_server(("127.0.0.1", 0)) as listener:
            hanging = [loop.create_task(connected_socket(f"{n}.{HANGING}", 9092)) for n in range(MAX_LOOK_UPS - 1)]
            await names.hang(len(hanging))
            for _ in range(2):
                (await connected_socket(host, listener.getsockname()[1])).close()
            assert names.look_ups[host] == look_ups
            for each in hanging:
                each.cancel()

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 60))


def address_of(sock: socket.socket) -> AddrInfoType:
    return socket.AF_INET, socket.SOCK_STREAM, 0, "", sock.getsockname()


@pytest.fixture
def refusing() -> Iterator[AddrInfoType]:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield address_of(closed)


@pytest.fixture
def silent() -> Iterator[AddrInfoType]:
    """The queue of this listener is full, so that the kernel answers no further connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield address_of(full)
        for each in waiting:
            each.close()


@pytest.mark.parametrize("other", ["refusing", "silent"])
async def test_the_next_address_is_tried(other: str, request: pytest.FixtureRequest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(60):
            sock = await connected_to([request.getfixturevalue(other), address_of(listener)])
        with sock:
            assert (sock.getpeername(), sock.getblocking()) == (listener.getsockname(), False)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_host_that_refuses_is_an_os_error(refusing: AddrInfoType) -> None:
    with pytest.raises(ConnectionRefusedError):
        await connected_to([refusing] * 2)
