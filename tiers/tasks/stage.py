"""`Stage`: one kind of work of a partition, with its own due time, failures, backoff, alarm and log lines.

The failure of a stage postpones that stage alone. Only a divergence and a lost ownership are
raised, since they stop every stage of the partition (docs/design.md, "Log range").
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tiers.errors import LogDivergedError, OwnershipLostError, RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.task_services import TaskServices
from tiers.texts import moment_text

T = TypeVar("T")
STOPPING: Final = (LogDivergedError, OwnershipLostError)
"""The errors that stop the whole partition."""
logger = logging.getLogger(__name__)


class Stage:
    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition, name: str) -> None:
        self.name = name
        self.due_ms = 0
        self.failures = 0
        """The failures since the last success."""
        self.last_error = ""
        self._services = services
        self._topic = topic_id_partition.topic
        self._alarm = self._topic, AlarmReason.STAGE_FAILING, f"{topic_id_partition} {name}"
        self._fields = {"partition": str(topic_id_partition), "stage": name}
        self._failing_since_ms = 0

    @property
    def is_due(self) -> bool:
        return self.due_ms <= self._services.clock_ms()

    @property
    def is_postponed(self) -> bool:
        """Whether the stage failed, and its backoff has not passed."""
        return self.failures > 0 and not self.is_due

    async def run(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Does the work once. Returns its result, or None if it failed.

        After a success, the stage is due one interval after it began, so that the stages of a round stay together.
        Raises the errors in `STOPPING`."""
        began_ms = self._services.clock_ms()
        try:
            result = await work()
        except STOPPING:
            raise
        except Exception as error:  # any other error of a stage must not affect the other stages
            self.failed(error)
            return None
        self.succeeded(began_ms)
        return result

    def succeeded(self, began_ms: int) -> None:
        services = self._services
        self.due_ms = max(services.clock_ms(), began_ms + services.settings.remote_log.task_interval_ms)
        self.failures, self.last_error = 0, ""
        if services.metrics.alarms.end(*self._alarm):
            logger.info("a stage of a partition works again", extra=self._fields)

    def failed(self, error: Exception) -> None:
        """Postpones the stage, and says why.

        While the stage keeps failing, each doubling of the failures is logged: an outage of the store concerns every
        partition, for long."""
        self.postpone(error)
        if self.failures & (self.failures - 1):
            return
        fields = {**self._fields, "error": self.last_error, "failures": self.failures}
        if isinstance(error, RemoteLogError):
            logger.warning("a stage of a partition failed", extra=fields)
        else:
            logger.exception("a stage of a partition failed", extra=fields, exc_info=error)

    def postpone(self, error: Exception) -> None:
        """Counts a failure. The backoff doubles with each one, up to the interval."""
        remote_log, now_ms = self._services.settings.remote_log, self._services.clock_ms()
        if self.failures == 0:
            self._failing_since_ms = now_ms
        pause_ms = remote_log.task_retry_backoff_ms << min(self.failures, 16)
        self.due_ms = now_ms + min(remote_log.task_interval_ms, pause_ms)
        self.failures += 1
        self.last_error = str(error) or repr(error)
        self._services.metrics.alarms.tell(*self._alarm, self.last_error)
        self._services.metrics.stage_failures.labels(self._topic, self.name).inc()

    def watch(self) -> None:
        """Raises an alarm if the stage fails for long, once until it works again."""
        services, failing_ms = self._services, self._services.clock_ms() - self._failing_since_ms
        is_for_long = self.failures > 0 and failing_ms >= services.settings.stage_alarm_ms
        if is_for_long and services.metrics.alarms.begin(*self._alarm, self.last_error):
            since = moment_text(services.wall_clock_ms() - failing_ms)
            fields = {**self._fields, "error": self.last_error, "since": since}
            logger.error("a stage of a partition keeps failing", extra=fields)
