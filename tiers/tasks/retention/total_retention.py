"""`TotalRetentionTask` records the total retention of the settings file, if that shortens nothing.

* The file's total is recorded for a topic that has no recorded one, if it is not shorter than the broker's retention,
  which was the total until then. The owner of the topic's partition 0 records it. Another member whose file has the
  total records it if the owner has not done so by the next run, since the owner's file may lack it.
* Every other difference between the file and the recorded total raises an alarm, also if the file's total is longer.
  A member that recorded a longer total would undo what an operator shortened.
* While the file and the recorded total differ, nothing of the topic expires (`policy_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from uuid import UUID

from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import TotalRetention, recorded_total
from tiers.errors import RemoteLogError
from tiers.lasting_trouble import LastingTrouble
from tiers.model.ids import TopicIdPartition
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


class TotalRetentionTask:
    def __init__(self, services: TaskServices) -> None:
        self._services = services
        self._conflicts: dict[UUID, str] = {}
        self._waiting: set[UUID] = set()
        """The topics whose total another member should have recorded by now."""
        self._failing = LastingTrouble(
            logger,
            "the total retention of a topic could not be recorded",
            "total retentions can be recorded again",
            clock_ms=services.clock_ms,
        )

    async def run(self, policies: Iterable[TopicPolicy]) -> None:
        """Records the totals that may be recorded, and raises the alarms, once per episode."""
        policies = list(policies)
        self._alarm([policy for policy in policies if policy.total_conflict])
        wanted = {policy.topic_id: policy for policy in policies if policy.total_to_record is not None}
        waiting, self._waiting = self._waiting & wanted.keys(), set(wanted)
        for topic_id, policy in wanted.items():
            partition = TopicIdPartition(topic_id, 0, policy.topic)
            if policy.total_to_record is None or not (topic_id in waiting or self._services.log.owns(partition)):
                continue
            try:
                await self._record(partition, policy.total_to_record)
                self._failing.ended()
            except RemoteLogError as error:
                self._failing.found(topic=policy.topic, error=str(error))

    async def _record(self, partition: TopicIdPartition, total: TotalRetention) -> None:
        services = self._services
        try:
            await services.metadata.change_topic_tier_config(
                partition.topic_id, partition.topic, total.config(), _check_unrecorded
            )
        except _AlreadyRecordedError:
            return
        logger.info("the total retention of a topic is recorded", extra={"topic": partition.topic, "total": str(total)})

    def _alarm(self, policies: list[TopicPolicy]) -> None:
        alarms, reason = self._services.metrics.alarms, AlarmReason.RETENTION_DIFFERS
        same = [each for each in policies if self._conflicts.get(each.topic_id) == each.total_conflict]
        alarms.end_others(reason, {(each.topic, "") for each in same})
        for policy in policies:
            if alarms.begin(policy.topic, reason, detail=policy.total_conflict):
                logger.error(
                    "the total retention in the settings file is not the recorded one: nothing of the topic expires;"
                    " `kafka-configs` through the proxy changes the recorded one",
                    extra={"topic": policy.topic, "reason": policy.total_conflict},
                )
        self._conflicts = {each.topic_id: each.total_conflict for each in policies}


class _AlreadyRecordedError(Exception):
    pass


def _check_unrecorded(config: Mapping[str, str]) -> None:
    if recorded_total(config).is_set:
        raise _AlreadyRecordedError
