"""Reads the start offsets of all share groups (KIP-932), because a trim beyond one would take records from its group.

* The coordinator of a group lists it, so the reader asks every broker. Brokers without share groups list none. The
  lists are complete only if no group moves from one broker to another meanwhile.
* A broker lists all groups only to a principal with DESCRIBE on the cluster, so the reader asks for this right each
  time. The offsets need DESCRIBE on the groups.
* A broker stores a start offset only when the first record is acknowledged or released. Until then a group with members
  may hold records, and its partitions must not be trimmed. A group without members holds none.
* The stored offset may lag behind the latest acknowledgement, but is never too high.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import UUID

from kafka.protocol.admin import DescribeClusterRequest, ListGroupsRequest
from kafka.protocol.api_message import ApiMessage

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

_GROUP_TYPES_SINCE = 5
_GROUP_ID_NOT_FOUND = 69
_DESCRIBE = 8
"""Kafka's number of the operation."""
_OUR_SCHEMAS = "protocol.schemas"
_GROUPS_TOPIC = "__consumer_offsets"
_EMPTY = "Empty"

_Starts = Mapping[tuple[UUID, int], "int | BrokerError"]


class DescribeShareGroupOffsetsRequest(ApiMessage, load_json=_OUR_SCHEMAS):  # type: ignore[call-arg,misc]  # untyped
    """The request of KIP-932 that asks for the start offsets of share groups."""


class DescribeShareGroupOffsetsResponse(ApiMessage, load_json=_OUR_SCHEMAS):  # type: ignore[call-arg,misc]  # untyped
    """The response of KIP-932 with the start offsets of share groups."""


async def may_describe_cluster(client: BrokerClient, timeout_ms: int) -> bool:
    """Whether brokers list all groups to the client. A broker without an authorizer grants everything."""
    message = DescribeClusterRequest(include_cluster_authorized_operations=True)
    response = await client.request(None, message, timeout_ms)
    if response.error_code != ErrorCode.NONE:
        raise BrokerError("the rights on the cluster cannot be read", response.error_code, retriable=True)
    return _DESCRIBE in response.authorized_operations


class ClusterShareGroups:
    """The start offsets of all share groups in the cluster.

    Concurrent callers share one round of requests, which begins after each of their calls: a group may be new."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._rounds_begun = 0
        self._round_known = 0
        self._starts: _Starts = {}

    async def lowest_start(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        """Returns the lowest start offset of any group in the partition; None when no group has one.

        Raises `BrokerError` when a broker or a group does not report its offsets. The caller must not trim then."""
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
        may_see_all = False
        for node_id in metadata.brokers:
            states = await self._states(node_id, timeout_ms)
            if states is None:
                continue
            if not may_see_all and not await may_describe_cluster(self._client, timeout_ms):
                raise BrokerError(
                    "a broker may leave out share groups: give DESCRIBE on the cluster to the proxy's principal",
                    retriable=True,
                )
            may_see_all = True
            if states:
                await self._add_starts(starts, node_id, states, timeout_ms)
        if _led(await self._coordinators(timeout_ms)) != _led(metadata):
            raise BrokerError(
                "share groups may have been missed, because their coordinators changed during the read", retriable=True
            )
        return starts

    async def _coordinators(self, timeout_ms: int) -> ClusterMetadata:
        """Returns the brokers and the leaders of the groups' partitions, read now.

        Older metadata may lack a broker that came back a moment ago."""
        metadata = await self._client.named([_GROUPS_TOPIC], (), timeout_ms)
        if any(leader_id < 0 for leader_id, _ in _led(metadata).values()):
            raise BrokerError("share groups are without a coordinator, so no broker lists them", retriable=True)
        return metadata

    async def _states(self, node_id: int, timeout_ms: int) -> dict[str, str] | None:
        """Returns the states of the groups that this broker coordinates, by group id. None: it has no share groups."""
        message = ListGroupsRequest(states_filter=[], types_filter=["share"])
        try:
            response = await self._client.request(node_id, message, timeout_ms, min_version=_GROUP_TYPES_SINCE)
        except BrokerError as error:
            if error.code == ErrorCode.UNSUPPORTED_VERSION:
                return None
            raise
        if response.error_code != ErrorCode.NONE:
            raise BrokerError("the share groups could not be listed", response.error_code, retriable=True)
        return {group.group_id: group.group_state for group in response.groups}

    async def _add_starts(
        self,
        starts: dict[tuple[UUID, int], int | BrokerError],
        node_id: int,
        states: Mapping[str, str],
        timeout_ms: int,
    ) -> None:
        request = DescribeShareGroupOffsetsRequest
        groups = [request.DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None) for group in states]
        for group in (await self._client.request(node_id, request(groups=groups), timeout_ms)).groups:
            name, code = f"share group {group.group_id}", group.error_code
            if code == _GROUP_ID_NOT_FOUND:
                continue
            if code != ErrorCode.NONE:
                raise BrokerError(f"{name} does not report its offsets", code, retriable=True)
            has_members = states.get(group.group_id) != _EMPTY
            for key, answer in ((topic.topic_id, each) for topic in group.topics for each in topic.partitions):
                place = key, answer.partition_index
                known = starts.get(place)
                if answer.error_code != ErrorCode.NONE:
                    starts[place] = BrokerError(f"{name} does not report its offset in a partition", answer.error_code)
                elif not isinstance(known, BrokerError) and (answer.start_offset >= 0 or has_members):
                    start = max(answer.start_offset, 0)
                    starts[place] = start if known is None else min(known, start)


def _led(metadata: ClusterMetadata) -> dict[int, tuple[int, int]]:
    """Returns the leader and its epoch for each partition of the topic that holds the groups."""
    groups = metadata.topics.get(_GROUPS_TOPIC)
    partitions = {} if groups is None else groups.partitions
    return {number: (one.leader_id, one.leader_epoch) for number, one in partitions.items()}
