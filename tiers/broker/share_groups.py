"""Where the share groups (KIP-932) of the cluster stand: a trim past the start of one would take records from it.

A group is asked where it is coordinated: that is the broker which lists it. Brokers without share groups list none.
What they list is all only if no group moved from one to another meanwhile.
Groups that we may not describe are not listed to us (DESCRIBE on groups is needed).

A group that has members and no start offset yet acquires records that no start offset tells of: the broker writes one
down with the first that is acknowledged or released. Until then its partitions stay as they are. Without members it
holds nothing: it begins again at what its share.auto.offset.reset finds then, in the local tier. A start offset is
written down as it was before the records that are just acknowledged, so it is one behind: never too high.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from kafka.protocol.admin import ListGroupsRequest
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tiers.broker.client import METADATA_WITH_TOPIC_IDS, BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata, from_response
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

_GROUP_TYPES_SINCE = 5
_GROUP_ID_NOT_FOUND = 69
_OUR_SCHEMAS = "protocol.schemas"
_GROUPS_TOPIC = "__consumer_offsets"
_EMPTY = "Empty"
_NO_ID = UUID(int=0)

_Starts = Mapping[tuple[UUID, int], "int | BrokerError"]


class DescribeShareGroupOffsetsRequest(ApiMessage, load_json=_OUR_SCHEMAS):  # type: ignore[call-arg,misc]  # untyped
    """KIP-932."""


class DescribeShareGroupOffsetsResponse(ApiMessage, load_json=_OUR_SCHEMAS):  # type: ignore[call-arg,misc]  # untyped
    """KIP-932."""


class ClusterShareGroups:
    """The cluster is asked once for all who wait: for every caller after it came, as a group may just have begun."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._rounds_begun = 0
        self._round_known = 0
        self._starts: _Starts = {}

    async def lowest_start(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        """The lowest share-partition start offset of any group, None when no group has one.

        `BrokerError` when a broker or group does not tell: then nothing is known, and nothing may be trimmed."""
        rounds_before = self._rounds_begun
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._lock:
                if self._round_known <= rounds_before:
                    self._rounds_begun += 1
                    self._starts = await self._read(timeout_ms)
                    self._round_known = self._rounds_begun
                start = self._starts.get((partition.topic_id, partition.partition))
        except TimeoutError as error:
            raise BrokerError("the share groups were not read in time", retriable=True) from error
        if isinstance(start, BrokerError):
            raise BrokerError(str(start), start.code, retriable=True)
        return start

    async def _read(self, timeout_ms: int) -> _Starts:
        metadata = await self._coordinators(timeout_ms)
        starts: dict[tuple[UUID, int], int | BrokerError] = {}
        for node_id in metadata.brokers:
            states = await self._states(node_id, timeout_ms)
            if states:
                await self._add_starts(starts, node_id, states, timeout_ms)
        if _led(await self._coordinators(timeout_ms)) != _led(metadata):
            raise BrokerError("share groups that moved while they were asked for may have been missed", retriable=True)
        return starts

    async def _coordinators(self, timeout_ms: int) -> ClusterMetadata:
        """The brokers, and who leads which groups, asked now: of a broker that came back a moment ago, older metadata
        knows nothing."""
        topic = MetadataRequest.MetadataRequestTopic(topic_id=_NO_ID, name=_GROUPS_TOPIC)
        message = MetadataRequest(topics=[topic], allow_auto_topic_creation=False)
        response = await self._client.request(None, message, timeout_ms, min_version=METADATA_WITH_TOPIC_IDS)
        metadata = from_response(response, 0)
        if any(leader_id < 0 for leader_id, _ in _led(metadata).values()):
            raise BrokerError("share groups without a coordinator are not listed", retriable=True)
        return metadata

    async def _states(self, node_id: int, timeout_ms: int) -> dict[str, str]:
        """Of the groups that this broker coordinates."""
        message = ListGroupsRequest(states_filter=[], types_filter=["share"])
        try:
            response = await self._client.request(node_id, message, timeout_ms, min_version=_GROUP_TYPES_SINCE)
        except BrokerError as error:
            if error.code == ErrorCode.UNSUPPORTED_VERSION:
                return {}
            raise
        if response.error_code != ErrorCode.NONE:
            raise BrokerError("share groups could not be listed", response.error_code, retriable=True)
        return {group.group_id: group.group_state for group in response.groups}

    async def _add_starts(
        self,
        starts: dict[tuple[UUID, int], int | BrokerError],
        node_id: int,
        states: Mapping[str, str],
        timeout_ms: int,
    ) -> None:
        request = DescribeShareGroupOffsetsRequest
        message = request(
            groups=[request.DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None) for group in states]
        )
        response = await self._client.request(node_id, message, timeout_ms)
        for group in response.groups:
            if group.error_code == _GROUP_ID_NOT_FOUND:
                continue
            if group.error_code != ErrorCode.NONE:
                raise BrokerError(f"share group {group.group_id} tells no offsets", group.error_code, retriable=True)
            _add_group(starts, group.group_id, group.topics, has_members=states.get(group.group_id) != _EMPTY)


def _led(metadata: ClusterMetadata) -> dict[int, tuple[int, int]]:
    """The leader and its epoch, by the number of a partition that has groups."""
    groups = metadata.topics.get(_GROUPS_TOPIC)
    partitions = {} if groups is None else groups.partitions
    return {number: (one.leader_id, one.leader_epoch) for number, one in partitions.items()}


def _add_group(
    starts: dict[tuple[UUID, int], int | BrokerError], group_id: str, topics: Sequence[Any], *, has_members: bool
) -> None:
    for topic in topics:
        for answer in topic.partitions:
            key = topic.topic_id, answer.partition_index
            known = starts.get(key)
            if answer.error_code != ErrorCode.NONE:
                starts[key] = BrokerError(f"share group {group_id} does not tell where it is", answer.error_code)
            elif not isinstance(known, BrokerError) and (answer.start_offset >= 0 or has_members):
                start = max(answer.start_offset, 0)
                starts[key] = start if known is None else min(known, start)
