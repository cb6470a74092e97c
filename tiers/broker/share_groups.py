"""Where the share groups (KIP-932) of the cluster stand: a trim past the start of one would take records from it.

A group is asked where it is coordinated: that is the broker which lists it. Groups that we may not describe are not
listed to us (DESCRIBE on groups is needed). Brokers without share groups list none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kafka.protocol.admin import ListGroupsRequest
from kafka.protocol.api_message import ApiMessage

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

_GROUP_TYPES_SINCE = 5
_GROUP_ID_NOT_FOUND = 69
_OUR_SCHEMAS = "protocol.schemas"


class DescribeShareGroupOffsetsRequest(ApiMessage, load_json=_OUR_SCHEMAS):  # type: ignore[call-arg,misc]  # untyped
    """KIP-932."""


class DescribeShareGroupOffsetsResponse(ApiMessage, load_json=_OUR_SCHEMAS):  # type: ignore[call-arg,misc]  # untyped
    """KIP-932."""


class ClusterShareGroups:
    """Asks anew at every call: a group may have been created a moment ago."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def lowest_start(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        """The lowest share-partition start offset of any group, None when no group has one.

        `BrokerError` when a broker or group does not tell: then nothing is known, and nothing may be trimmed."""
        metadata = await self._client.metadata(timeout_ms=timeout_ms)
        starts: list[int] = []
        for node_id in metadata.brokers:
            groups = await self._groups(node_id, timeout_ms)
            if groups:
                starts += await self._starts(node_id, groups, partition, timeout_ms)
        return min(starts, default=None)

    async def _groups(self, node_id: int, timeout_ms: int) -> list[str]:
        message = ListGroupsRequest(states_filter=[], types_filter=["share"])
        try:
            response = await self._client.request(node_id, message, timeout_ms, min_version=_GROUP_TYPES_SINCE)
        except BrokerError as error:
            if error.code == ErrorCode.UNSUPPORTED_VERSION:
                return []
            raise
        if response.error_code != ErrorCode.NONE:
            raise BrokerError("share groups could not be listed", response.error_code, retriable=True)
        return [group.group_id for group in response.groups]

    async def _starts(self, node_id: int, groups: list[str], partition: TopicIdPartition, timeout_ms: int) -> list[int]:
        request = DescribeShareGroupOffsetsRequest
        message = request(
            groups=[request.DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None) for group in groups]
        )
        response = await self._client.request(node_id, message, timeout_ms)
        return list(_starts_of(response, partition))


def _starts_of(response: Any, partition: TopicIdPartition) -> Iterator[int]:
    for group in response.groups:
        if group.error_code == _GROUP_ID_NOT_FOUND:
            continue
        if group.error_code != ErrorCode.NONE:
            raise BrokerError(f"share group {group.group_id} tells no offsets", group.error_code, retriable=True)
        for topic in group.topics:
            if topic.topic_id != partition.topic_id:
                continue
            for answer in topic.partitions:
                if answer.partition_index != partition.partition:
                    continue
                if answer.error_code != ErrorCode.NONE:
                    raise BrokerError(
                        f"share group {group.group_id} does not tell where it is", answer.error_code, retriable=True
                    )
                if answer.start_offset >= 0:
                    yield answer.start_offset
