"""One loop per process: work is run on it, items come in order and not too far ahead, failures come out."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from pipeline.config import PipelineConfig, parse_pipeline_config
from pipeline.worker import Worker
from tests.support.rigs.waiting import until
from tiers.storage.remote_storage_manager import RemoteStorageManager


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


def test_interrupted_work_has_ended_when_the_interrupt_comes_out(worker: Worker) -> None:
    waiting, said = threading.get_ident(), list[str]()

    def interrupt(*_: object) -> None:
        if not said:
            said.append("interrupted")
            raise KeyboardInterrupt

    async def works() -> None:
        try:
            while True:  # a signal is lost if it comes just before the thread waits
                signal.pthread_kill(waiting, signal.SIGUSR1)
                await asyncio.sleep(0.05)
        finally:
            await asyncio.sleep(0.05)
            said.append("ended")

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.run(works())
        assert said == ["interrupted", "ended"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_more_is_made_than_may_be_ahead(worker: Worker) -> None:
    seen: list[int] = []
    items = worker.iterate(numbers(100, seen), ahead=2)
    assert next(items) == 0
    until(lambda: len(seen) >= 4)
    worker.run(asyncio.sleep(0.01))
    assert seen == [0, 1, 2, 3]  # one given, two waiting, one that waits for room
    items.close()
    assert seen == [0, 1, 2, 3, -1]


def test_a_failure_comes_after_what_came_before_it(worker: Worker) -> None:
    items = worker.iterate(numbers(2, [], ValueError("a damaged chunk")))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="a damaged chunk"):
        next(items)


class Store:
    """Says when it is closed; `closing` is what happens first."""

    def __init__(self, name: str, said: list[str], closing: Callable[[], Awaitable[object]]) -> None:
        self._name, self._said, self._closing = name, said, closing

    async def open(self) -> None:
        self._said.append(f"{self._name} open")

    async def close(self) -> None:
        await self._closing()
        self._said.append(f"{self._name} closed")


async def at_once() -> None:
    return


async def broken() -> None:
    raise OSError("connection lost")


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("closing", "timeout_s", "said"),
    [
        (at_once, 60, ["third closed", "second closed", "first closed"]),
        (broken, 60, ["first closed"]),
        (never, 0.1, ["first closed"]),
    ],
)
def test_a_resource_that_cannot_be_closed_keeps_nothing_else_open(
    closing: Callable[[], Awaitable[object]], timeout_s: float, said: list[str]
) -> None:
    worker, heard = Worker(), list[str]()
    for store in (Store("first", heard, at_once), Store("second", heard, closing), Store("third", heard, closing)):
        worker.run(worker.keep(cast(RemoteStorageManager, store)))
    worker.close(timeout_s)
    worker.close(timeout_s)
    assert heard == ["first open", "second open", "third open", *said]


def config_of(password: str, folder: Path, more: str = "") -> PipelineConfig:
    return parse_pipeline_config(
        f"""
        [upstream]
        bootstrap.servers = "localhost:1"
        sasl = {{mechanism = "PLAIN", username = "alice", password = "{password}"}}
        [storage]
        implementation = "local"
        path = "{folder}"
        {more}
        """
    )


def test_an_open_resource_is_shared_by_users_with_equal_settings_alone(worker: Worker, tmp_path: Path) -> None:
    mine, again, another = (config_of(password, tmp_path) for password in ("mine", "mine", "guessed"))
    assert worker.run(worker.client(mine)) is worker.run(worker.client(again))
    assert worker.run(worker.client(mine)) is not worker.run(worker.client(another))
    store = worker.run(worker.storage(mine, "cluster"))
    assert worker.run(worker.storage(again, "cluster")) is store
    assert worker.run(worker.storage(mine, "another")) is not store
    (tmp_path / "new").mkdir()
    grown = config_of("mine", tmp_path, f'[[storage.locations]]\nname = "new"\npath = "{tmp_path}/new"')
    assert worker.run(worker.storage(grown, "cluster")) is not store


def test_open_resources_are_closed_when_the_process_ends() -> None:
    program = """
from pipeline.worker import worker
class Store:
    async def open(self): print("open")
    async def close(self): print("closed")
worker().run(worker().keep(Store()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert (ended.stdout.split(), ended.stderr) == (["open", "closed"], "")
