"""`Fitness`: what makes a process unfit, and how long it must be well before it counts as fit again."""

from __future__ import annotations

import asyncio

import pytest

from tiers.fitness import LONGEST_RECOVERY_MS, RECOVERY_MS, Fitness, FitnessMetrics, Probe

INTERVAL_MS = 5_000


class Disk:
    is_full = False
    hangs: asyncio.Event | None = None

    async def write(self) -> None:
        if self.hangs is not None:
            await self.hangs.wait()
        if self.is_full:
            raise OSError("no space left on device")


class Machine:
    """A process with one disk and one store, whose clock goes on with each round of probes."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.disk, self.store = Disk(), Disk()
        self.probes = [Probe("disk", self.disk.write), Probe("store", self.store.write, 3)]
        self.fitness = Fitness(
            self.probes, interval_ms=INTERVAL_MS, clock_ms=lambda: self.now_ms, wall_clock_ms=lambda: 0
        )

    async def rounds(self, count: int) -> None:
        for _ in range(count):
            for probe in self.probes:
                await self.fitness.probe(probe)
            self.now_ms += INTERVAL_MS

    async def recovery_ms(self) -> int:
        """Returns how long the process stays unfit although all probes succeed."""
        began_at_ms = self.now_ms
        while not self.fitness.is_fit:
            await self.rounds(1)
        return self.now_ms - INTERVAL_MS - began_at_ms


async def test_one_failure_is_no_reason() -> None:
    machine = Machine()
    machine.disk.is_full = True
    await machine.rounds(1)
    assert machine.fitness.is_fit
    machine.disk.is_full = False
    await machine.rounds(1)
    machine.disk.is_full = True
    await machine.rounds(1)
    assert machine.fitness.is_fit


async def test_failures_in_a_row_are_told_once_with_reason_and_time(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.disk.is_full = True
    await machine.rounds(5)
    assert machine.fitness.reason == "disk: no space left on device"
    (line,) = caplog.records
    assert (line.levelname, line.__dict__["error"]) == ("ERROR", "no space left on device")
    assert line.__dict__["since"] == "1970-01-01T00:00:00+00:00"
    assert [sample.value for one in FitnessMetrics(machine.fitness).collect() for sample in one.samples] == [1.0]


async def test_each_probe_has_its_own_patience() -> None:
    machine = Machine()
    machine.store.is_full = True
    await machine.rounds(2)
    assert machine.fitness.is_fit
    await machine.rounds(1)
    assert not machine.fitness.is_fit


async def test_a_probe_that_hangs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.disk.hangs = asyncio.Event()
    monkeypatch.setattr(machine.fitness, "_interval_ms", 1)
    await machine.rounds(2)
    assert machine.fitness.reason == "disk: no answer in 1 ms"


async def test_it_is_fit_again_after_a_minute_without_any_failure() -> None:
    machine = Machine()
    machine.disk.is_full = True
    await machine.rounds(2)
    machine.disk.is_full = False
    await machine.rounds(RECOVERY_MS // INTERVAL_MS - 1)
    again = "disk: no space left on device; it works again, and the process is fit after 60 s without a failure"
    assert machine.fitness.reason == again
    machine.store.is_full = True
    await machine.rounds(1)  # one failure of another probe, and the minute begins again
    assert machine.fitness.reason == "disk: no space left on device"
    machine.store.is_full = False
    assert not machine.fitness.is_fit
    assert await machine.recovery_ms() == RECOVERY_MS


async def test_the_time_doubles_with_every_relapse() -> None:
    machine = Machine()
    waited = []
    for _ in range(6):
        machine.disk.is_full = True
        await machine.rounds(2)
        machine.disk.is_full = False
        waited.append(await machine.recovery_ms())
    assert waited == [RECOVERY_MS, 2 * RECOVERY_MS, 4 * RECOVERY_MS, 8 * RECOVERY_MS, *[LONGEST_RECOVERY_MS] * 2]
    machine.now_ms += LONGEST_RECOVERY_MS
    machine.disk.is_full = True
    await machine.rounds(2)
    machine.disk.is_full = False
    assert await machine.recovery_ms() == RECOVERY_MS, "it was well for long"


async def test_the_loop_probes_everything_until_it_is_cancelled() -> None:
    probed: dict[str, asyncio.Event] = {"disk": asyncio.Event(), "late": asyncio.Event()}

    async def check(name: str) -> None:
        probed[name].set()

    fitness = Fitness([Probe("disk", lambda: check("disk"))], interval_ms=60_000, wall_clock_ms=lambda: 0)
    fitness.add(Probe("late", lambda: check("late")))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(fitness.run())
        for event in probed.values():
            await event.wait()
        running.cancel()
