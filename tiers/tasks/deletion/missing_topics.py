"""`MissingTopics` decides which topics that no broker knows may be deleted from the remote tier.

* A missing topic was deleted, or the cluster's metadata lost it: a KRaft log that was restored from a copy lacks topics
  as well. So the owner deletes a topic's segments only if the deletion is proved, or if the topic was missing, alone,
  for days. A DeleteTopics answer that a proxy relayed, or an operator's confirmation, is a proof. A record says since
  when a topic is missing.
* Topics that went missing at about the same time need an operator, however long they are missing. If an operator
  confirms that one of them was deleted, that topic still counts for the others. Otherwise the last of them would look
  like a topic that went missing alone.
* The records of two topics may be in two metadata partitions. So a topic counts as missing alone only while this
  process has read all metadata partitions to their ends.
* The owner of a topic's partition 0 keeps these records. It ends them when a broker knows the topic again, or when the
  remote tier has nothing of the topic. A record that ends too early only delays a deletion.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from uuid import UUID

from tiers.model.ids import TopicIdPartition
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.task_services import TaskServices

SAME_TIME_MS = 3_600_000
"""Topics that went missing within an hour of each other did so at the same time."""
logger = logging.getLogger(__name__)


def vanished_together(missing: Mapping[UUID, int]) -> set[UUID]:
    """Returns the topics of `missing` that went missing at the same time as another one.

    `missing` has the time (ms) since which each topic is missing."""
    together: set[UUID] = set()
    for (earlier, since_ms), (later, later_ms) in pairwise(sorted(missing.items(), key=lambda each: each[1])):
        if later_ms - since_ms < SAME_TIME_MS:
            together |= {earlier, later}
    return together


class MissingTopics:
    """Keeps the records of missing topics whose partition 0 this process owns, and judges the records of all owners."""

    def __init__(self, services: TaskServices) -> None:
        self._services = services
        self._missing_since_ms: dict[UUID, int] = {}
        self._idle_since_ms: dict[UUID, int] = {}
        self._alarmed: dict[UUID, str] = {}
        """The names of the topics with the alarm, by id."""
        self._skewed: dict[UUID, str] = {}
        """The names of the topics whose time since which they are missing the clocks make unknown, by id."""

    def see(self, missing: Collection[UUID]) -> None:
        """Takes the ids that no broker knows now, out of all ids that the caller asked about."""
        now_ms = self._services.clock_ms()
        self._missing_since_ms = {each: self._missing_since_ms.get(each, now_ms) for each in missing}
        self._end_skews(self._skewed.keys() - self._missing_since_ms.keys())

    async def record(self, topic: TopicIdPartition, *, is_left: bool) -> None:
        """Records that the topic is missing or is there again, or ends its records.

        `topic` is partition 0 of the topic. This process owns it, and the last call of `see` covered it. `is_left` is
        true when the metadata has segments or settings of the topic."""
        metadata, topic_id = self._services.metadata, topic.topic_id
        is_recorded, is_proved = topic_id in metadata.missing_topics(), metadata.is_topic_deleted(topic_id)
        is_missing = topic_id in self._missing_since_ms
        if is_recorded and not is_missing:
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=False)
            logger.info("a topic that was missing is there again", extra={"topic": topic.topic, "id": str(topic_id)})
        elif not is_recorded and not is_proved and is_left and self._was_missing_before(topic_id):
            await self._record_missing(topic)
        if (is_missing and is_left) or not (is_recorded or is_proved):
            self._idle_since_ms.pop(topic_id, None)
        elif (
            self._is_idle_for_long(topic_id) and self._services.knows_all_partitions and not self._is_counted(topic_id)
        ):
            await self._end_records(topic)

    async def _end_records(self, topic: TopicIdPartition) -> None:
        metadata, topic_id = self._services.metadata, topic.topic_id
        if topic_id in metadata.missing_topics():
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=False)
        if metadata.is_topic_deleted(topic_id):
            await metadata.end_topic_deletion(topic_id)

    def _was_missing_before(self, topic_id: UUID) -> bool:
        """Whether an earlier call of `see` had the topic too. At the first, a proxy may still record the deletion."""
        since_ms = self._missing_since_ms.get(topic_id)
        return since_ms is not None and since_ms < self._services.clock_ms()

    async def _record_missing(self, topic: TopicIdPartition) -> None:
        if await self._brokers_now_ms(topic) is None:
            return
        await self._services.metadata.put_topic_missing(topic.topic_id, topic.topic, is_missing=True)
        logger.warning(
            "no broker knows a tiered topic any more, and its deletion is not proved: the owner deletes it when it was"
            " missing for remote.log.topic.deletion.unproved.delay.ms, or when an operator confirms the deletion:"
            " see `tidegate tier missing-topics`",
            extra={"topic": topic.topic, "id": str(topic.topic_id)},
        )

    def _is_idle_for_long(self, topic_id: UUID) -> bool:
        """Whether the records of the topic were not needed for the delay that a deletion waits.

        They are not needed when a broker knows the topic, or when the tier has nothing of it. The delay is needed since
        this process may read other metadata partitions late, and a broker may learn of a deletion late."""
        now_ms = self._services.clock_ms()
        since_ms = self._idle_since_ms.setdefault(topic_id, now_ms)
        return now_ms - since_ms >= self._services.settings.remote_log.topic_deletion_delay_ms

    def _is_counted(self, topic_id: UUID) -> bool:
        """Whether the topic went missing at the same time as another one that is still missing without a proof."""
        metadata = self._services.metadata
        missing = dict(metadata.missing_topics())
        since_ms = missing.get(topic_id)
        return since_ms is not None and any(
            abs(other_ms - since_ms) < SAME_TIME_MS and not metadata.is_topic_deleted(other)
            for other, other_ms in missing.items()
            if other != topic_id
        )

    def proved(self, topics: Collection[TopicIdPartition]) -> set[UUID]:
        """Returns the topics whose deletion is proved and that no broker has known for the deletion delay.

        `topics` has any one partition of each topic."""
        return {
            each.topic_id for each in self._waited(topics) if self._services.metadata.is_topic_deleted(each.topic_id)
        }

    async def missing_for_long(self, topics: Collection[TopicIdPartition]) -> set[UUID]:
        """Returns the topics that may be deleted without a proof.

        Each went missing alone, and longer ago than `topic_deletion_unproved_delay_ms`. None is returned while a record
        of another topic may be unread."""
        services, settings = self._services, self._services.settings
        if not services.knows_all_partitions:
            return set()
        missing = dict(services.metadata.missing_topics())
        alone = missing.keys() - vanished_together(missing)
        # Reading the brokers' time costs a record. So it is read only if a topic may be due by this machine's clock.
        soonest_ms = (
            services.wall_clock_ms() - settings.remote_log.topic_deletion_unproved_delay_ms + settings.max_clock_skew_ms
        )
        due = [each for each in self._waited(topics) if each.topic_id in alone and missing[each.topic_id] <= soonest_ms]
        # An alarm ends with an answer, and a topic that is recorded may not be due any more.
        asked = [*due, *(each for each in topics if each.topic_id in self._skewed.keys() & missing.keys())]
        brokers_now_ms = await self._brokers_now_ms(asked[0]) if asked else None
        if brokers_now_ms is None:
            return set()
        latest_ms = brokers_now_ms - settings.remote_log.topic_deletion_unproved_delay_ms
        return {each.topic_id for each in due if missing[each.topic_id] <= latest_ms}

    def _waited(self, topics: Collection[TopicIdPartition]) -> list[TopicIdPartition]:
        now_ms, delay_ms = self._services.clock_ms(), self._services.settings.remote_log.topic_deletion_delay_ms
        return [each for each in topics if now_ms - self._missing_since_ms.get(each.topic_id, now_ms) >= delay_ms]

    async def _brokers_now_ms(self, topic: TopicIdPartition) -> int | None:
        """Returns the present time (ms) of the clock that stamps the records.

        None when that clock differs from this machine's clock by more than `max_clock_skew_ms`."""
        services, limit_ms = self._services, self._services.settings.max_clock_skew_ms
        skew_ms = await services.metadata.clock_skew_ms(topic, anew=True)
        if abs(skew_ms) <= limit_ms:
            self._end_skews(self._skewed.keys())  # the clock of this machine is one for all topics
            return services.wall_clock_ms() + skew_ms
        self._skewed[topic.topic_id] = topic.topic
        detail = f"the clocks differ by {skew_ms} ms"
        if services.metrics.alarms.begin(topic.topic, AlarmReason.CLOCK_SKEW, str(topic.topic_id), detail):
            logger.error(
                "the time since which a topic is missing is unknown while this machine's clock and the brokers' clock"
                " differ: synchronize the clocks",
                extra={"topic": topic.topic, "skew_ms": skew_ms},
            )
        return None

    def _end_skews(self, ended: Collection[UUID]) -> None:
        for topic_id in set(ended):
            topic = self._skewed.pop(topic_id)
            self._services.metrics.alarms.end(topic, AlarmReason.CLOCK_SKEW, str(topic_id))

    def watch(self, topics: Collection[TopicIdPartition], names: Mapping[UUID, str]) -> None:
        """Raises an alarm, once per episode, when some of `topics` went missing at the same time as others.

        This process owns partition 0 of `topics`. `names` has the names of all topics that the metadata knows."""
        metadata = self._services.metadata
        missing = dict(metadata.missing_topics())
        together = {each for each in vanished_together(missing) if not metadata.is_topic_deleted(each)}
        fresh = [each for each in topics if each.topic_id in together - self._alarmed.keys()]
        alarms = self._services.metrics.alarms
        for topic_id in self._alarmed.keys() - (together & {each.topic_id for each in topics}):
            alarms.end(self._alarmed.pop(topic_id), AlarmReason.TOPICS_MISSING, str(topic_id))
        self._alarmed |= {each.topic_id: each.topic for each in fresh}
        if not fresh:
            return
        for topic in fresh:
            since = f"missing since {datetime.fromtimestamp(missing[topic.topic_id] / 1000, UTC):%FT%TZ}"
            alarms.begin(topic.topic, AlarmReason.TOPICS_MISSING, str(topic.topic_id), since)
        said = [
            f"{names.get(each, '')} ({each}) since {datetime.fromtimestamp(missing[each] / 1000, UTC):%FT%TZ}"
            for each in sorted(together, key=lambda each: (missing[each], names.get(each, "")))
        ]
        logger.error(
            "several tiered topics went missing at about the same time, as after the restore of a KRaft log: nothing of"
            " them is deleted until an operator decides. If they were deleted, run `tidegate tier missing-topics"
            " forget`; if not, restore the cluster's metadata with these topics under their ids",
            extra={"topics": said},
        )
