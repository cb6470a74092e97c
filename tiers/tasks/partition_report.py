"""`PartitionReport`: what the owner's tasks know about a partition now, for people who look at it."""

from __future__ import annotations

from dataclasses import dataclass

from tiers.tasks.hold import Hold
from tiers.tasks.partition_tasks import PartitionTasks


@dataclass(frozen=True, slots=True)
class StageReport:
    """A stage of the tasks. `failures` are those since the last success, `error` is the last of them."""

    name: str
    failures: int
    error: str
    is_running: bool


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """`uncopied_bytes` is an estimate of the bytes that are not remote.
    `behind_ms` is how long one of their records has waited. `alarms` are the reasons in docs/alarms.md whose alarms are
    raised now."""

    uncopied_bytes: int
    behind_ms: int
    alarms: tuple[str, ...]
    stages: tuple[StageReport, ...]
    stopped: str = ""
    """Why the partition stopped; empty while it has not."""
    doubt: str = ""
    """Why the owner doubts the past; empty while it does not."""
    copy_hold: Hold | None = None
    """Why the last round copied nothing; None: something was due."""

    @property
    def error(self) -> str:
        """The last error of the first stage that fails; empty without one."""
        return next((stage.error for stage in self.stages if stage.failures), "")


def report_of(tasks: PartitionTasks) -> PartitionReport:
    stages = tuple(
        StageReport(name, stage.failures, stage.last_error, name in tasks.running)
        for name, stage in tasks.stages.items()
    )
    alarms = tuple(sorted(map(str, tasks.alarms)))
    copy = tasks.copy
    return PartitionReport(
        copy.uncopied.size_bytes, copy.behind_ms, alarms, stages, tasks.stopped, tasks.doubt, copy.hold
    )
