"""A name is looked up once for all who need it, and its addresses outlast a resolver that fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.simulation.loop import VirtualLoop
from tiers.resolver import KEPT_S, MAX_NAMES, PATIENCE_S, Addresses, Question, Resolver

BROKER = Question("broker-1.example", 9092)
LOOK_UP_S = 0.033
HANGS_S = 30.0
OLD: Addresses = ["old"]
NEW: Addresses = ["new"]


class Names:
    """The name service. Each look-up has the next of the answers; the last one stays."""

    def __init__(self, *answers: Addresses | Exception, takes_s: float = LOOK_UP_S) -> None:
        self.answers = list(answers)
        self.takes_s = takes_s
        self.look_ups = 0

    async def look_up(self, asked: Question) -> Addresses:
        self.look_ups += 1
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        await asyncio.sleep(self.takes_s)
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(main: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


def error(code: int) -> socket.gaierror:
    return socket.gaierror(code, "no answer")


def test_all_who_wait_share_one_look_up() -> None:
    async def main() -> None:
        names = Names(OLD)
        resolver = Resolver(names.look_up)
        assert await asyncio.gather(*(resolver.resolve(BROKER) for _ in range(1_000))) == [OLD] * 1_000
        assert names.look_ups == 1

    run(main())


def test_addresses_are_used_for_a_time_and_then_looked_up_again() -> None:
    async def main() -> None:
        names = Names(OLD, NEW)
        resolver = Resolver(names.look_up)
        await resolver.resolve(BROKER)
        await asyncio.sleep(KEPT_S - 0.1)
        assert await resolver.resolve(BROKER) == OLD
        assert names.look_ups == 1
        await asyncio.sleep(0.1)
        assert await resolver.resolve(BROKER) == NEW

    run(main())


def test_a_name_that_never_had_an_answer_is_an_error_until_it_has_one() -> None:
    async def main() -> None:
        resolver = Resolver(Names(error(socket.EAI_AGAIN), NEW).look_up)
        answers = await asyncio.gather(*(resolver.resolve(BROKER) for _ in range(2)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [socket.gaierror] * 2
        assert await resolver.resolve(BROKER) == NEW

    run(main())


@pytest.mark.parametrize("failure", [error(socket.EAI_AGAIN), TimeoutError()])
def test_a_look_up_that_fails_leaves_the_former_addresses(failure: Exception) -> None:
    async def main() -> None:
        names = Names(OLD, failure, NEW)
        resolver = Resolver(names.look_up)
        await resolver.resolve(BROKER)
        await asyncio.sleep(KEPT_S)
        assert await resolver.resolve(BROKER) == OLD
        await asyncio.sleep(KEPT_S)
        assert await resolver.resolve(BROKER) == NEW
        assert names.look_ups == 3

    run(main())


def test_a_look_up_that_hangs_holds_up_known_names_once_and_briefly() -> None:
    async def main() -> None:
        names = Names(OLD, NEW)
        resolver = Resolver(names.look_up)
        await resolver.resolve(BROKER)
        await asyncio.sleep(KEPT_S)
        names.takes_s = HANGS_S
        began_s = now_s()
        assert await resolver.resolve(BROKER) == OLD
        assert now_s() - began_s == pytest.approx(PATIENCE_S)
        assert await resolver.resolve(BROKER) == OLD
        assert now_s() - began_s == pytest.approx(PATIENCE_S)
        await asyncio.sleep(HANGS_S)
        assert await resolver.resolve(BROKER) == NEW
        assert names.look_ups == 2

    run(main())


def test_a_name_that_exists_no_more_loses_its_addresses() -> None:
    async def main() -> None:
        resolver = Resolver(Names(OLD, error(socket.EAI_NONAME), error(socket.EAI_AGAIN)).look_up)
        await resolver.resolve(BROKER)
        await asyncio.sleep(KEPT_S)
        for _ in range(2):
            with pytest.raises(socket.gaierror):
                await resolver.resolve(BROKER)

    run(main())


def test_a_caller_that_leaves_ends_no_look_up() -> None:
    async def main() -> None:
        names = Names(NEW)
        resolver = Resolver(names.look_up)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(resolver.resolve(BROKER))
            second = group.create_task(resolver.resolve(BROKER))
            await asyncio.sleep(LOOK_UP_S / 2)
            first.cancel()
        assert second.result() == NEW
        assert names.look_ups == 1

    run(main())


def test_names_take_bounded_memory() -> None:
    async def main() -> None:
        names = Names(OLD, takes_s=0)
        resolver = Resolver(names.look_up)
        for number in range(MAX_NAMES + 2):
            await resolver.resolve(Question(f"broker-{number}.example", 9092))
        await resolver.resolve(Question("broker-0.example", 9092))
        assert names.look_ups == MAX_NAMES + 3

    run(main())
