"""`Fitness`: what makes a process unfit, and how long it must be well before it counts as fit again."""

from __future__ import annotations

import asyncio

import pytest

from tiers.fitness import LONGEST_RECOVERY_MS, RECOVERY_MS, Fitness, Probe

INTERVAL_MS = 5_000


class Machine:
    """A process with one disk and one store, whose clock goes on with each round of probes."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.full: set[str] = set()
        self.probes = [Probe("disk", lambda: self.write("disk")), Probe("store", lambda: self.write("store"), 3)]
        self.fitness = Fitness(interval_ms=INTERVAL_MS, clock_ms=lambda: self.now_ms, wall_clock_ms=lambda: 0)

    async def write(self, name: str) -> None:
        if name in self.full:
            raise OSError("no space left on device")

    async def rounds(self, count: int, *full: str) -> bool:
        """Returns whether the process is fit after so many rounds."""
        self.full = set(full)
        for _ in range(count):
            for probe in self.probes:
                await self.fitness.probe(probe)
            self.now_ms += INTERVAL_MS
        return self.fitness.is_fit

    async def recovery_ms(self) -> int:
        """Returns how long the process stays unfit although all probes succeed."""
        began_at_ms = self.now_ms
        while not await self.rounds(1):
            pass
        return self.now_ms - INTERVAL_MS - began_at_ms


@pytest.fixture
def machine() -> Machine:
    return Machine()


async def test_each_probe_has_its_own_patience_with_failures_in_a_row(machine: Machine) -> None:
    for count, full, is_fit in ((1, "disk", True), (1, "", True), (1, "disk", True), (2, "store", True)):
        assert await machine.rounds(count, full) is is_fit
    assert not await machine.rounds(1, "store")


async def test_the_begin_is_logged_once_with_reason_and_time(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    await machine.rounds(5, "disk")
    assert machine.fitness.reason == "disk: no space left on device"
    (line,) = caplog.records
    assert (line.levelname, line.__dict__["error"]) == ("ERROR", "no space left on device")
    assert line.__dict__["since"] == "1970-01-01T00:00:00+00:00"


async def test_it_is_fit_again_after_a_minute_without_any_failure(machine: Machine) -> None:
    await machine.rounds(2, "disk")
    await machine.rounds(RECOVERY_MS // INTERVAL_MS - 1)
    again = "disk: no space left on device; it works again, and the process is fit after 60 s without a failure"
    assert machine.fitness.reason == again
    await machine.rounds(1, "store")  # one failure of another probe, and the minute begins again
    assert machine.fitness.reason == "disk: no space left on device"
    assert await machine.recovery_ms() == RECOVERY_MS


async def test_the_time_doubles_with_every_relapse(machine: Machine) -> None:
    waited = []
    for _ in range(6):
        await machine.rounds(2, "disk")
        waited.append(await machine.recovery_ms())
    assert waited == [RECOVERY_MS, 2 * RECOVERY_MS, 4 * RECOVERY_MS, 8 * RECOVERY_MS, *[LONGEST_RECOVERY_MS] * 2]
    machine.now_ms += LONGEST_RECOVERY_MS
    await machine.rounds(2, "disk")
    assert await machine.recovery_ms() == RECOVERY_MS, "it was well for long"


async def test_the_loop_probes_everything_and_a_probe_that_hangs_has_failed() -> None:
    probed = asyncio.Event()

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def late() -> None:
        probed.set()

    fitness = Fitness(interval_ms=1, wall_clock_ms=lambda: 0)
    fitness.add(Probe("disk", hangs, 1))
    fitness.add(Probe("late", late))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(fitness.run())
        await probed.wait()
        while fitness.is_fit:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0)
        running.cancel()
    assert fitness.reason == "disk: no answer in 1 ms"
