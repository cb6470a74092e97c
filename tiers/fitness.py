"""`Fitness` tells whether this process can do the work of an owner: it can write its disks and use the store.

Only local evidence counts: the probes, and never what happens to one partition. The group gives an unfit member no
partitions while another one is fit (docs/design.md, "Ownership"). A process that was unfit must pass all probes for a
while before it counts as fit again. The time doubles with every relapse, so that partitions do not move all the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tiers.broker.client import monotonic_ms
from tiers.metric_spec import GaugeSpec

logger = logging.getLogger(__name__)

UNFIT = GaugeSpec(
    "tidegate_unfit", "1: this process cannot work as an owner. It keeps partitions only while no other process can."
)

STORE_PROBE: Final = "store"
PROBE_INTERVAL_MS: Final = 5_000
"""How often this process probes. A probe that takes longer has failed."""
RECOVERY_MS = 60_000
LONGEST_RECOVERY_MS = 600_000
_RELAPSE_WITHIN_MS = 600_000
"""A process that is unfit again within this time has relapsed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that an owner must be able to do. `check` raises an exception when this process cannot do it.

    The process is unfit after `failures` failures in a row."""

    name: str
    check: Callable[[], Awaitable[None]]
    failures: int = 2


class Fitness:
    """The fitness of one process. It is fit until a probe says otherwise."""

    def __init__(
        self,
        *,
        interval_ms: int = PROBE_INTERVAL_MS,
        clock_ms: Callable[[], int] = monotonic_ms,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._probes: dict[str, Probe] = {}
        self._interval_ms = interval_ms
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._failures: dict[str, int] = {}
        self._passes_since_ms: int | None = None
        self._fit_since_ms: int | None = None
        self._recovery_ms = RECOVERY_MS
        self._trouble = ""
        self.reason: str | None = None
        """Why this process is unfit, as a text for an operator; None while it is fit."""

    @property
    def failing(self) -> list[str]:
        """The names of the probes that fail now."""
        return [name for name, failures in self._failures.items() if failures]

    @property
    def is_fit(self) -> bool:
        return self.reason is None

    def add(self, probe: Probe) -> None:
        """Adds a probe, or replaces the one with its name, before `run`."""
        self._probes[probe.name] = probe

    async def run(self) -> None:
        """Probes until cancelled. A probe that takes longer than the interval has failed."""
        async with asyncio.TaskGroup() as tasks:
            for probe in self._probes.values():
                tasks.create_task(self._keep(probe), name=f"probe-{probe.name}")

    async def _keep(self, probe: Probe) -> None:
        while True:
            await self.probe(probe)
            await asyncio.sleep(self._interval_ms / 1000)

    async def probe(self, probe: Probe) -> None:
        try:
            async with asyncio.timeout(self._interval_ms / 1000):
                await probe.check()
        except TimeoutError:
            self._failed(probe, f"no answer in {self._interval_ms} ms")
        except Exception as error:  # whatever it is, this process cannot do the work
            self._failed(probe, str(error) or repr(error))
        else:
            self._passed(probe)

    def _failed(self, probe: Probe, error: str) -> None:
        self._failures[probe.name] = self._failures.get(probe.name, 0) + 1
        self._passes_since_ms = None
        if self._failures[probe.name] < probe.failures:
            self.reason = None if self.reason is None else self._trouble
            return
        if self.reason is None:
            fit_since_ms, now_ms = self._fit_since_ms, self._clock_ms()
            is_relapse = fit_since_ms is not None and now_ms - fit_since_ms < _RELAPSE_WITHIN_MS
            self._recovery_ms = min(2 * self._recovery_ms, LONGEST_RECOVERY_MS) if is_relapse else RECOVERY_MS
            since = datetime.fromtimestamp(self._wall_clock_ms() / 1000, UTC).isoformat(timespec="seconds")
            logger.error(
                "this process cannot work as an owner, and keeps partitions only while no other process can",
                extra={"probe": probe.name, "error": error, "since": since},
            )
        self.reason = self._trouble = f"{probe.name}: {error}"

    def _passed(self, probe: Probe) -> None:
        self._failures[probe.name] = 0
        if self.reason is None or any(self._failures.values()):
            return
        now_ms = self._clock_ms()
        if self._passes_since_ms is None:
            self._passes_since_ms = now_ms
            again = f"it works again, and the process is fit after {self._recovery_ms // 1000} s without a failure"
            self.reason = f"{self._trouble}; {again}"
        if now_ms - self._passes_since_ms >= self._recovery_ms:
            logger.warning("this process can work as an owner again", extra={"was": self._trouble})
            self.reason, self._fit_since_ms, self._passes_since_ms = None, now_ms, None
