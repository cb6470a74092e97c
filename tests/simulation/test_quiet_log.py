"""Proxies over tiered topics that nothing happens to: their logs have no line."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import full
from tests.support.simulation.environment import simulated_environment, unheard_garbage
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.simulation import Simulation

START_S = 30.0
IDLE_S = 60.0
STOP_S = 10.0


class IdleCluster(Simulation):
    """Two or three proxies, and topics without records."""

    topics = 0

    def _settings(self) -> dict[str, Any]:
        topics = [{"pattern": "idle-*"}]
        return {**super()._settings(), "topics": topics, "remote.log.manager.task.interval.ms": 30_000}

    async def idle(self, lines: list[str]) -> float:
        """Fills `lines` while nothing happens. Returns how many partitions the proxies own together."""
        configs = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
        for number in range(self.topics):
            self.cluster.create_topic(f"idle-{number}", 1, configs)
        for machine in self.machines:
            machine.start()
        await asyncio.sleep(START_S)
        assert lines  # the proxies tell what they own
        lines.clear()
        await asyncio.sleep(IDLE_S)
        said, processes = lines.copy(), [machine.process for machine in self.machines if machine.process is not None]
        owned = [process.registry.get_sample_value("tidegate_owned_partitions") or 0 for process in processes]
        for machine in self.machines:
            machine.stop()
        await asyncio.sleep(STOP_S)
        lines[:] = said
        return sum(owned)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@pytest.mark.parametrize("topics", [40, *full(1_000)])
def test_idle_proxies_log_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, topics: int) -> None:
    caplog.set_level(logging.INFO)
    handler = Lines()
    logging.root.addHandler(handler)
    try:
        assert owned_while_idle(tmp_path, topics, handler.said) == topics
    finally:
        logging.root.removeHandler(handler)
    assert handler.said == []


def owned_while_idle(folder: Path, topics: int, lines: list[str]) -> float:
    loop = VirtualLoop()
    with unheard_garbage(), simulated_environment(loop, 1):
        try:
            cluster = IdleCluster(1, loop, folder)
            cluster.topics = topics
            return float(loop.run_virtual(cluster.idle(lines)))
        finally:
            loop.close()
