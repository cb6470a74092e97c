"""`MissingTopics` keeps the records of tiered topics that no broker knows.

A missing topic was deleted, or the cluster's metadata lost it: a KRaft log that was restored from a copy lacks topics
as well. So the owner deletes a topic's segments only if the deletion is proved (`deleted_topics`). A record says since
when a topic is missing.

The owner of a topic's partition 0 keeps these records, and those of the topic's deletion. It ends them when a broker
knows the topic, or when the remote tier has nothing of the topic.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from uuid import UUID

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import TopicDeletionUpdate
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


def deleted_topics(metadata: RemoteLogMetadataState) -> set[UUID]:
    """Returns the ids of the topics whose deletion is proved.

    A client's request to delete the topic was recorded, and the topic was missing soon after it. Or an operator said
    that the topic was deleted."""
    missing = metadata.missing_topics()
    return {each for each, deletion in metadata.topic_deletions().items() if deletion.is_proof(missing.get(each))}


class MissingTopics:
    """Keeps the records of missing topics whose partition 0 this process owns."""

    def __init__(self, services: TaskServices) -> None:
        self._services = services
        self._missing_since_ms: dict[UUID, int] = {}
        self._recorded: Mapping[UUID, int] = {}
        self._deletions: Mapping[UUID, TopicDeletionUpdate] = {}
        self._idle_since_ms: dict[UUID, tuple[TopicDeletionUpdate | None, int]] = {}
        """The recorded deletion, and the time since which the records of the topic are not needed."""
        self._alarmed: dict[UUID, str] = {}
        """The names of the topics with the alarm, by id."""

    def see(self, missing: Collection[UUID]) -> None:
        """Takes the ids that no broker knows now, out of all ids that the caller asked about. Reads the records."""
        self._recorded = self._services.state.missing_topics()
        self._deletions = self._services.state.topic_deletions()
        now_ms = self._services.clock_ms()
        self._missing_since_ms = {each: self._missing_since_ms.get(each, now_ms) for each in missing}

    async def record(self, topic: TopicIdPartition, *, is_left: bool) -> None:
        """Records that the topic is missing or is there again, or ends its records.

        `topic` is partition 0 of the topic. This process owns it, and the last call of `see` covered it. `is_left` is
        true when the metadata has segments or settings of the topic."""
        metadata, topic_id = self._services.metadata, topic.topic_id
        is_recorded, deletion = topic_id in self._recorded, self._deletions.get(topic_id)
        is_missing = topic_id in self._missing_since_ms
        if is_recorded and not is_missing:
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=False)
            logger.info("a topic that was missing is there again", extra={"topic": topic.topic, "id": str(topic_id)})
        elif not is_recorded and is_left and self._was_missing_before(topic_id):
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=True)
        if (is_missing and is_left) or not (is_recorded or deletion):
            self._idle_since_ms.pop(topic_id, None)
        elif self._is_idle_for_long(topic_id, deletion) and self._services.knows_all_partitions:
            await self._end_records(topic, deletion)

    async def _end_records(self, topic: TopicIdPartition, deletion: TopicDeletionUpdate | None) -> None:
        metadata, topic_id = self._services.metadata, topic.topic_id
        if topic_id in metadata.state.missing_topics():
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=False)
        if deletion is not None and metadata.state.topic_deletions().get(topic_id) == deletion:
            await metadata.end_topic_deletion(topic_id)

    def _was_missing_before(self, topic_id: UUID) -> bool:
        """Whether an earlier call of `see` had the topic too: the brokers were asked twice."""
        since_ms = self._missing_since_ms.get(topic_id)
        return since_ms is not None and since_ms < self._services.clock_ms()

    def _is_idle_for_long(self, topic_id: UUID, deletion: TopicDeletionUpdate | None) -> bool:
        """Whether the records of the topic were not needed for the delay that a deletion waits.

        They are not needed when a broker knows the topic, or when the tier has nothing of it. The delay is needed since
        this process may read other metadata partitions late, and a broker may learn of a deletion late. It begins anew
        with each recorded deletion."""
        now_ms = self._services.clock_ms()
        known, since_ms = self._idle_since_ms.setdefault(topic_id, (deletion, now_ms))
        if known != deletion:
            self._idle_since_ms[topic_id] = deletion, now_ms
            return False
        return now_ms - since_ms >= self._services.settings.remote_log.topic_deletion_delay_ms

    def proved(self, topics: Collection[TopicIdPartition]) -> set[UUID]:
        """Returns the topics whose deletion is proved and that no broker has known for the deletion delay.

        `topics` has any one partition of each topic."""
        now_ms, delay_ms = self._services.clock_ms(), self._services.settings.remote_log.topic_deletion_delay_ms
        missing_for_long = {
            each.topic_id for each in topics if now_ms - self._missing_since_ms.get(each.topic_id, now_ms) >= delay_ms
        }
        return missing_for_long & deleted_topics(self._services.state)

    def watch(self, topics: Collection[TopicIdPartition]) -> None:
        """Raises an alarm, once per episode, for each of `topics` that is missing without a proof.

        This process owns partition 0 of `topics`."""
        metadata, alarms = self._services.state, self._services.metrics.alarms
        missing = metadata.missing_topics()
        recorded = missing.keys() - deleted_topics(metadata)
        unproved = {each.topic_id: each for each in topics if each.topic_id in recorded}
        for topic_id in self._alarmed.keys() - unproved.keys():
            alarms.end(self._alarmed.pop(topic_id), AlarmReason.TOPICS_MISSING, str(topic_id))
        for topic_id, topic in unproved.items():
            if topic_id in self._alarmed:
                continue
            self._alarmed[topic_id] = topic.topic
            since = f"{datetime.fromtimestamp(missing[topic_id] / 1000, UTC):%FT%TZ}"
            alarms.begin(topic.topic, AlarmReason.TOPICS_MISSING, str(topic_id), f"missing since {since}")
            logger.error(
                "no broker knows a tiered topic any more, and its deletion is not proved: nothing of it is deleted"
                " until an operator decides. If it was deleted, run `tidegate tier delete-missing`; if not,"
                " restore the cluster's metadata with this topic under its id",
                extra={"topic": topic.topic, "id": str(topic_id), "since": since},
            )
