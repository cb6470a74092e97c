"""The probes of a process: its folders and its store."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from proxy.config import TidegateConfig
from proxy.process.checks.probes import run_probes
from tests.support.tiers.waiting import until
from tiers.broker.client import wall_clock_ms
from tiers.errors import RemoteStorageError
from tiers.fitness import Fitness
from tiers.storage.local import LocalRemoteStorageManager


class Refusing(LocalRemoteStorageManager):
    refuses = False

    async def delete_object(self, key: str) -> None:
        if self.refuses:
            raise RemoteStorageError("403 Forbidden")
        await super().delete_object(key)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Refusing]:
    (tmp_path / "store").mkdir()
    made = Refusing({"path": str(tmp_path / "store"), "cluster.id": "cluster"})
    await made.open()
    yield made
    await made.close()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def quick_fitness() -> Fitness:
    return Fitness(interval_ms=1_000, wall_clock_ms=wall_clock_ms)


@pytest.fixture
def config(tmp_path: Path) -> TidegateConfig:
    return TidegateConfig.model_validate(
        {
            "upstream": {"bootstrap.servers": ["broker:9092"]},
            "state": {"path": tmp_path / "state"},
        }
    )


async def test_probes_leave_nothing_behind_and_say_that_all_is_well(
    config: TidegateConfig, store: Refusing, tmp_path: Path
) -> None:
    registry, fitness = CollectorRegistry(), quick_fitness()
    async with AsyncExitStack() as stack:
        await run_probes(stack, config, store, fitness, registry)
        await until(lambda: len(fitness._failures) == 3)
        assert set(fitness._failures.values()) == {0}
        assert registry.get_sample_value("tidegate_unfit") == 0
    assert files(tmp_path) == []


async def test_a_store_that_refuses_this_process_makes_it_unfit(
    config: TidegateConfig, store: Refusing, tmp_path: Path
) -> None:
    store.refuses = True
    fitness = quick_fitness()
    async with AsyncExitStack() as stack:
        await run_probes(stack, config, store, fitness, CollectorRegistry())
        await until(lambda: not fitness.is_fit)
        assert fitness.reason == "store: 403 Forbidden"


async def test_a_folder_that_cannot_be_written_makes_it_unfit(
    config: TidegateConfig, store: Refusing, tmp_path: Path
) -> None:
    config.state.path.mkdir()
    (config.state.path / "spool").write_text("a file is in its place")
    fitness = quick_fitness()
    async with AsyncExitStack() as stack:
        await run_probes(stack, config, store, fitness, CollectorRegistry())
        await until(lambda: not fitness.is_fit)
        assert str(fitness.reason).startswith("spool folder: ")


async def test_a_disk_that_hangs_makes_it_unfit_and_holds_up_no_end(
    config: TidegateConfig, store: Refusing, tmp_path: Path
) -> None:
    probe = tmp_path / "state" / "metadata" / ".probe"
    probe.parent.mkdir(parents=True)
    os.mkfifo(probe)  # a write to it hangs
    fitness = quick_fitness()
    async with AsyncExitStack() as stack:
        await run_probes(stack, config, store, fitness, CollectorRegistry())
        await until(lambda: not fitness.is_fit)
        assert fitness.reason == "state folder: no answer in 1000 ms"
    hanging = [thread for thread in threading.enumerate() if thread.name == "disk-probe"]
    assert hanging
    assert all(thread.daemon for thread in hanging), "the interpreter would wait for others"
    reader = os.open(probe, os.O_RDONLY | os.O_NONBLOCK)
    await until(lambda: not any(thread.is_alive() for thread in hanging))
    os.close(reader)


async def test_killed_processes_leave_one_object_at_most(
    config: TidegateConfig, store: Refusing, tmp_path: Path
) -> None:
    store.refuses = True  # as if each process were killed before it deletes the object

    for _ in range(3):
        fitness = quick_fitness()
        async with AsyncExitStack() as stack:
            await run_probes(stack, config, store, fitness, CollectorRegistry())
            while not fitness._failures.get("store"):  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.001)
    assert len(files(tmp_path / "store")) == 1
