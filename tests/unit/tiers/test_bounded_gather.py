"""Few of many items run at a time. Results keep their order, and an item is taken when its turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest

from tiers.bounded_gather import bounded_gather


@pytest.mark.parametrize("is_lazy", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3, 50])
async def test_results_are_in_order_and_few_are_worked_on(count: int, is_lazy: bool) -> None:
    taken = running = most = 0
    done: list[int] = []

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(count):
            taken += 1
            yield number

    async def square(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert not is_lazy or taken - number <= most
        for _ in range(number % 3):
            await asyncio.sleep(0)
        running -= 1
        return number * number

    several: Iterable[int] = items() if is_lazy else range(count)
    assert await bounded_gather(several, square, 3, lambda: done.append(1)) == [each**2 for each in range(count)]
    assert (most <= 3, len(done)) == (True, count)


@pytest.mark.parametrize("failure", [ValueError("2"), asyncio.CancelledError()])
async def test_the_first_failure_or_cancellation_of_a_call_ends_all(failure: BaseException) -> None:
    begun = []

    async def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise failure
        await asyncio.sleep(0)

    with pytest.raises(type(failure)):
        await bounded_gather(iter(range(10)), work, 2)
    assert len(begun) < 10 or isinstance(failure, asyncio.CancelledError)
