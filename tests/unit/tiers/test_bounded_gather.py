"""Few of many items run at a time. Results keep their order, and an item is taken when its turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest

from tiers.bounded_gather import bounded_gather


class Work:
    def __init__(self) -> None:
        self.taken = self.running = self.most = 0

    def items(self, count: int) -> Iterator[int]:
        for number in range(count):
            self.taken += 1
            yield number

    async def square(self, number: int) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.taken - number <= self.most
        for _ in range(number % 3):
            await asyncio.sleep(0)
        self.running -= 1
        return number * number


@pytest.mark.parametrize("is_lazy", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3, 50])
async def test_results_are_in_order_and_few_are_worked_on(count: int, is_lazy: bool) -> None:
    work = Work()
    done: list[int] = []
    items: Iterable[int] = work.items(count) if is_lazy else list(work.items(count))
    if not is_lazy:
        work.taken = 0
    assert await bounded_gather(items, work.square, 3, lambda: done.append(1)) == [each**2 for each in range(count)]
    assert work.most <= 3
    assert len(done) == count


async def test_the_first_failure_ends_all_and_comes_out_alone() -> None:
    begun = []

    async def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise ValueError(number)
        await asyncio.sleep(0)

    with pytest.raises(ValueError, match="2"):
        await bounded_gather(iter(range(1000)), work, 2)
    assert len(begun) < 10


async def test_a_call_that_was_cancelled_by_itself_leaves_no_result_out() -> None:
    async def work(number: int) -> int:
        if number == 1:
            raise asyncio.CancelledError
        return number

    with pytest.raises(asyncio.CancelledError):
        await bounded_gather(range(3), work, 2)
