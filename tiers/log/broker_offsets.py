"""`offsets_for_times`: sends ListOffsets by timestamp for many partitions, one request per leader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kafka.protocol.consumer import ListOffsetsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.fetch import READ_COMMITTED, READ_UNCOMMITTED
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

_CONSUMER_REPLICA_ID = -1
_LANE = "offsets"
_PAUSE_MS = 200
_WITH_LEADER_EPOCH = 4


async def offsets_for_times(
    client: BrokerClient, times_ms: Mapping[TopicIdPartition, int], *, is_committed_only: bool, timeout_ms: int
) -> dict[TopicIdPartition, int | None]:
    """Returns the first offset with the given timestamp or a later one, or None if there is none. For the timestamp -1
    it returns the end of the log that the isolation level allows. Raises `BrokerError`."""
    found: dict[TopicIdPartition, int | None] = {}
    deadline_ms = monotonic_ms() + timeout_ms
    max_age_ms = 30_000
    while left := {partition: time for partition, time in times_ms.items() if partition not in found}:
        try:
            by_leader: dict[int, dict[TopicIdPartition, int]] = {}
            for partition, time_ms in left.items():
                leader = await client.leader_of(partition, timeout_ms, max_age_ms)
                by_leader.setdefault(leader.node_id, {})[partition] = time_ms
            for node_id, asked in by_leader.items():
                found |= await _ask(client, node_id, asked, is_committed_only, deadline_ms)
        except BrokerError as error:
            if not error.retriable or monotonic_ms() >= deadline_ms:
                raise
            await asyncio.sleep(_PAUSE_MS / 1000)
            max_age_ms = 0
    return found


async def _ask(
    client: BrokerClient, node_id: int, asked: Mapping[TopicIdPartition, int], is_committed_only: bool, deadline_ms: int
) -> dict[TopicIdPartition, int | None]:
    request = ListOffsetsRequest
    topics: dict[str, list[Any]] = {}
    for partition, time_ms in asked.items():
        one = request.ListOffsetsTopic.ListOffsetsPartition(
            partition_index=partition.partition, current_leader_epoch=-1, timestamp=time_ms
        )
        topics.setdefault(partition.topic, []).append(one)
    message = request(
        replica_id=_CONSUMER_REPLICA_ID,
        isolation_level=READ_COMMITTED if is_committed_only else READ_UNCOMMITTED,
        topics=[request.ListOffsetsTopic(name=name, partitions=parts) for name, parts in topics.items()],
    )
    response = await client.request(
        node_id, message, max(1, deadline_ms - monotonic_ms()), min_version=_WITH_LEADER_EPOCH, lane=_LANE
    )
    partitions = {(one.topic, one.partition): one for one in asked}
    found: dict[TopicIdPartition, int | None] = {}
    for topic in response.topics:
        for answer in topic.partitions:
            partition = partitions[topic.name, answer.partition_index]
            if answer.error_code != ErrorCode.NONE:
                is_refused = answer.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
                raise BrokerError(
                    f"{partition}: ListOffsets returned error {answer.error_code}",
                    answer.error_code,
                    retriable=not is_refused,
                )
            found[partition] = answer.offset if answer.offset >= 0 else None
    if missing := asked.keys() - found.keys():
        raise BrokerError(f"the answer to ListOffsets lacks {next(iter(missing))}", retriable=True)
    return found
