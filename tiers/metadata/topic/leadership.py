"""`MetadataLeadership` asks brokers who leads the metadata partitions, and as of when that is so.

A leader that is cut off from the controllers keeps answering, and lacks the records that its successor commits. So its
answer is complete only as of the time at which another broker named the same leader epoch. A leader that is the only
in-sync replica needs none, since no other replica can have been elected.

The high watermark of a new leader may lie below the committed end until its followers have fetched. Brokers refuse
ListOffsets until then (OFFSET_NOT_AVAILABLE), so the first successful ListOffsets ends this doubt.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kafka.protocol.consumer import ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient, Leader
from tiers.broker.fetch import READ_UNCOMMITTED
from tiers.errors import BrokerError
from tiers.metadata.topic.followed_partition import FollowedPartition
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.model.log_source import EpochEndOffset

logger = logging.getLogger(__name__)

WITNESSES = 3
"""The number of brokers asked at a time: one may be the leader itself, and another one may be down."""
_NEWER_WITHIN_MS = 200
_METADATA_WITH_TOPIC_IDS = 10
_TELLS_OF_A_LAGGING_HIGH_WATERMARK = 5
"""The first version of ListOffsets with OFFSET_NOT_AVAILABLE. Older ones answer LEADER_NOT_AVAILABLE, also an error."""
LATEST_TIMESTAMP = -1
_CONSUMER_REPLICA_ID = -1
_FENCES_BY_LEADER_EPOCH = 2
"""The version of OffsetForLeaderEpoch whose requests have the current leader epoch."""


class MetadataLeadership:
    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        partitions: Sequence[FollowedPartition],
        *,
        clock_ms: Callable[[], int],
    ) -> None:
        self._client = client
        self._topic = topic
        self._partitions = partitions
        self._clock_ms = clock_ms

    async def confirm(self, timeout_ms: int, partition: FollowedPartition | None = None) -> None:
        """Asks some brokers who leads, and takes each answer as it arrives. Raises `BrokerError` without any answer.

        With a metadata partition, the call does not wait for all brokers, since one of them may hang. Once the leader
        of that partition is confirmed, the other brokers get a moment to name a newer leader."""
        metadata = self._client.cached_metadata
        nodes = [] if metadata is None else sorted(metadata.brokers)
        chosen = random.sample(nodes, min(WITNESSES, len(nodes)))
        began_at_ms = self._clock_ms()
        async with asyncio.TaskGroup() as asking:
            asked = [asking.create_task(self._ask(node_id, timeout_ms)) for node_id in chosen]
            pending = set(asked)
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                confirmed_at_ms = None if partition is None else partition.confirmed_at_ms
                if pending and confirmed_at_ms is not None and confirmed_at_ms >= began_at_ms:
                    await asyncio.wait(pending, timeout=_NEWER_WITHIN_MS / 1000)
                    break
            for late in asked:
                late.cancel()
        if not any(answer.result() for answer in asked if not answer.cancelled()):
            raise BrokerError("no broker answered who leads the metadata topic", retriable=True)

    async def _ask(self, node_id: int, timeout_ms: int) -> bool:
        asked_at_ms = self._clock_ms()
        message = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=self._topic.name)],
            allow_auto_topic_creation=False,
        )
        try:
            response = await self._client.request(node_id, message, timeout_ms, min_version=_METADATA_WITH_TOPIC_IDS)
            self._hear(node_id, response, asked_at_ms)
        except BrokerError as error:
            logger.debug(
                "a broker did not answer who leads the metadata topic",
                extra={"node_id": node_id, "error": str(error)},
            )
            return False
        return True

    def _hear(self, witness: int, response: Any, asked_at_ms: int) -> None:
        topic = next((each for each in response.topics if each.topic_id == self._topic.topic_id), None)
        if response.cluster_id != self._topic.cluster_id or topic is None:
            raise BrokerError(
                f"the cluster has no topic {self._topic.name} with the known topic id", ErrorCode.UNKNOWN_TOPIC_ID
            )
        for said in topic.partitions:
            if said.partition_index >= len(self._partitions):
                continue  # the topic was grown: no process writes to it any more, and the known partitions are read on
            partition, leader = self._partitions[said.partition_index], Leader(said.leader_id, said.leader_epoch)
            if leader.leader_epoch < partition.leader.leader_epoch:
                continue  # this broker knows less than another one that answered before
            if leader != partition.leader:
                partition.leader, partition.confirmed_at_ms = leader, None
            if witness != leader.node_id or list(said.isr_nodes) == [leader.node_id]:
                partition.confirmed_at_ms = max(asked_at_ms, partition.confirmed_at_ms or asked_at_ms)

    async def offsets(self, asked: Mapping[int, Leader], timestamp: int, timeout_ms: int) -> dict[int, int]:
        """Returns the offset for `timestamp` of each metadata partition in `asked`, by ListOffsets.

        All metadata partitions in `asked` have the same leader node, and each is asked for in its leader's epoch. The
        result leaves out those that failed. Raises `BrokerError`."""
        topic = ListOffsetsRequest.ListOffsetsTopic(
            name=self._topic.name,
            partitions=[
                ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
                    partition_index=number, current_leader_epoch=leader.leader_epoch, timestamp=timestamp
                )
                for number, leader in asked.items()
            ],
        )
        message = ListOffsetsRequest(replica_id=_CONSUMER_REPLICA_ID, isolation_level=READ_UNCOMMITTED, topics=[topic])
        answers = await self._answers(asked.values(), message, timeout_ms, _TELLS_OF_A_LAGGING_HIGH_WATERMARK)
        return {one.partition_index: int(one.offset) for one in answers}

    async def epoch_ends(self, asked: Mapping[int, tuple[Leader, int]], timeout_ms: int) -> dict[int, EpochEndOffset]:
        """Asks a leader for the end offsets of leader epochs, by metadata partition (docs/semantics.md 6.1).

        All metadata partitions in `asked` have the same leader node. The result leaves out those that failed. Raises
        `BrokerError`."""
        request = OffsetForLeaderEpochRequest
        partition = request.OffsetForLeaderTopic.OffsetForLeaderPartition
        topic = request.OffsetForLeaderTopic(
            topic=self._topic.name,
            partitions=[
                partition(partition=number, current_leader_epoch=leader.leader_epoch, leader_epoch=leader_epoch)
                for number, (leader, leader_epoch) in asked.items()
            ],
        )
        message = request(replica_id=_CONSUMER_REPLICA_ID, topics=[topic])
        leaders = [leader for leader, _ in asked.values()]
        answers = await self._answers(leaders, message, timeout_ms, _FENCES_BY_LEADER_EPOCH)
        return {one.partition: EpochEndOffset(one.leader_epoch, int(one.end_offset)) for one in answers}

    async def _answers(self, leaders: Iterable[Leader], message: Any, timeout_ms: int, min_version: int) -> list[Any]:
        """Returns what the common leader node answers about the partitions for which it names no error."""
        (node_id,) = {leader.node_id for leader in leaders}
        response = await self._client.request(node_id, message, timeout_ms, min_version=min_version)
        return [one for topic in response.topics for one in topic.partitions if one.error_code == ErrorCode.NONE]
