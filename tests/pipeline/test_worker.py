"""One loop per process: work is run on it, items come in order and not too far ahead, failures come out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from pipeline.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker()


async def numbers(count: int, seen: list[int], failure: Exception | None = None) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            seen.append(number)
            yield number
        if failure is not None:
            raise failure
    finally:
        seen.append(-1)


def test_work_gives_its_result_or_its_error(worker: Worker) -> None:
    async def fails() -> None:
        raise LookupError("no such segment")

    assert worker.run(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(LookupError, match="no such segment"):
        worker.run(fails())


def test_items_come_in_order_and_then_end(worker: Worker) -> None:
    assert list(worker.iterate(numbers(100, []))) == list(range(100))


def test_no_more_is_made_than_may_be_ahead(worker: Worker) -> None:
    seen: list[int] = []
    items = worker.iterate(numbers(100, seen), ahead=2)
    assert next(items) == 0
    worker.run(asyncio.sleep(0.01))
    assert seen == [0, 1, 2, 3]  # one given, two waiting, one that waits for room
    items.close()
    assert seen == [0, 1, 2, 3, -1]


def test_a_failure_comes_after_what_came_before_it(worker: Worker) -> None:
    items = worker.iterate(numbers(2, [], ValueError("a damaged chunk")))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="a damaged chunk"):
        next(items)
