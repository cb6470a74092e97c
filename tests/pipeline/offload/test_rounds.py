"""An offload with an interval: its rounds, its pauses, and its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from pipeline.offload.driver import OffloadReport, PartitionReport
from pipeline.offload.job import offload_rounds, pause_s
from tiers.access.open_tier import RemoteTierError
from tiers.broker.tls import TlsError
from tiers.config.tier_config import ConfigError
from tiers.errors import BrokerError
from tiers.upkeep.runner import JobError

REPORT = OffloadReport((), 1, 1.0, 1.0)


@dataclass
class Service:
    """Runs the given rounds in order. Then an interrupt ends the pause."""

    rounds: list[Callable[[], OffloadReport]]
    has_work: list[bool] = field(default_factory=list)
    shown: int = 0
    pauses_s: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def run(self) -> OffloadReport:
        return self.rounds.pop(0)()

    def wait(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        if not self.rounds and not self.has_work:
            raise KeyboardInterrupt

    def show(self, report: OffloadReport) -> None:
        self.shown += 1

    def serve(self) -> None:
        work = self.has_work
        offload_rounds(lambda: work.pop(0) if work else True, self.run, self.show, 60, self.wait, self.said.append)


def fails(error: Exception) -> Callable[[], OffloadReport]:
    def run() -> OffloadReport:
        raise error

    return run


def test_failing_rounds_end_nothing_and_come_ever_more_rarely() -> None:
    trouble = [JobError("no executor"), RemoteTierError("no broker\nanswers"), BrokerError("no leader")]
    service = Service([*map(fails, trouble), lambda: REPORT, fails(trouble[0])])
    with pytest.raises(KeyboardInterrupt):
        service.serve()
    assert service.pauses_s == [120, 240, 480, 60, 120]
    assert service.shown == 1
    assert service.said[1] == "offload: no broker answers; again in 240 s"


def test_a_round_that_copies_nothing_for_all_its_troubles_has_failed() -> None:
    stuck = PartitionReport("orders", 0, 0, 0, 0, 0, 100, 0, 0, "503")
    moving = replace(stuck, segments=1, log_bytes=10)
    service = Service([partial(replace, REPORT, partitions=(one,)) for one in (stuck, stuck, moving, stuck)])
    with pytest.raises(KeyboardInterrupt):
        service.serve()
    assert service.shown == 4
    assert service.pauses_s == [120, 240, 60, 120]


@pytest.mark.parametrize("error", [ConfigError("/k: No such file"), TlsError("ca: /c: No such file")])
def test_a_mistake_in_the_settings_ends_only_the_first_round(error: Exception) -> None:
    service = Service([fails(error)])
    with pytest.raises(type(error)):
        service.serve()
    service = Service([lambda: REPORT, fails(error), lambda: REPORT])
    with pytest.raises(KeyboardInterrupt):
        service.serve()
    assert service.pauses_s == [60, 120, 60]


def test_without_work_nothing_is_owned() -> None:
    service = Service([lambda: REPORT], [False, False, True])
    with pytest.raises(KeyboardInterrupt):
        service.serve()
    assert (service.shown, service.pauses_s) == (1, [60, 60, 60])


@pytest.mark.parametrize(("interval_s", "longest_s"), [(1, 900), (60, 900), (3600, 3600)])
def test_pauses_have_a_limit(interval_s: float, longest_s: float) -> None:
    assert pause_s(interval_s, 0) == interval_s
    assert pause_s(interval_s, 10_000) == longest_s
