"""The answers about the cluster, its groups, and the disks of brokers. All rights are granted by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kafka.protocol.admin import (
    DescribeClusterResponse,
    DescribeConfigsResponse,
    DescribeLogDirsResponse,
    ListGroupsResponse,
)
from kafka.protocol.metadata import ApiVersionsResponse

from protocol.errors import ErrorCode
from tiers.broker.share_groups import DescribeShareGroupOffsetsResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

_DESCRIBE = 8
_Folder = DescribeLogDirsResponse.DescribeLogDirsResult
GROUP_ID_NOT_FOUND = 69
_Group = DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseGroup
_Topic = _Group.DescribeShareGroupOffsetsResponseTopic
_Partition = _Topic.DescribeShareGroupOffsetsResponsePartition


@dataclass(frozen=True)
class ShareGroup:
    group_id: str
    state: str = "Stable"
    starts: Mapping[tuple[UUID, int], int] = field(default_factory=dict)


async def api_versions(broker: ScriptedBroker, request: Any) -> Any:
    return versions_of(broker)


def versions_of(broker: ScriptedBroker, error: int = 0) -> Any:
    keys = [
        ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
        for key, (low, high) in broker.versions.items()
    ]
    return ApiVersionsResponse(error_code=error, api_keys=keys, throttle_time_ms=0)


async def describe_cluster(broker: ScriptedBroker, request: Any) -> Any:
    return DescribeClusterResponse(
        throttle_time_ms=0,
        error_code=0,
        error_message=None,
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=[],
        authorized_operations=broker.cluster_operations,
    )


async def describe_configs(broker: ScriptedBroker, request: Any) -> Any:
    """No topic has any settings."""
    return DescribeConfigsResponse(throttle_time_ms=0, results=[])


async def describe_log_dirs(broker: ScriptedBroker, request: Any) -> Any:
    if _DESCRIBE not in broker.cluster_operations:
        return no_log_dirs()
    assert request.topics is None, "the client asks for all logs"
    return log_dirs({name: sum(map(len, log.batches)) for name, log in broker.logs.items()})


def no_log_dirs() -> Any:
    """Before version 3, the encoded response has no field for the error."""
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED, results=[])


def log_dirs(sizes: Mapping[tuple[str, int], int], error: int = ErrorCode.NONE, *, is_future: bool = False) -> Any:
    """Returns the answer of a broker with one folder. A log that moves there from another folder `is_future`."""
    topic = _Folder.DescribeLogDirsTopic
    topics = [
        topic(
            name=name,
            partitions=[
                topic.DescribeLogDirsPartition(
                    partition_index=index, partition_size=size_bytes, offset_lag=0, is_future_key=is_future
                )
            ],
        )
        for (name, index), size_bytes in sizes.items()
    ]
    folder = _Folder(error_code=error, log_dir="/data", topics=topics, total_bytes=-1, usable_bytes=-1)
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=ErrorCode.NONE, results=[folder])


async def list_groups(broker: ScriptedBroker, request: Any) -> Any:
    return ListGroupsResponse(
        throttle_time_ms=0,
        error_code=0,
        groups=[
            ListGroupsResponse.ListedGroup(
                group_id=group.group_id, protocol_type="share", group_state=group.state, group_type="share"
            )
            for group in broker.share_groups
        ],
    )


def no_groups(error_code: int) -> Any:
    def edit(response: Any) -> None:
        response.error_code, response.groups = error_code, []

    return edit


async def describe_share_group_offsets(broker: ScriptedBroker, request: Any) -> Any:
    groups = {group.group_id: group for group in broker.share_groups}
    return DescribeShareGroupOffsetsResponse(
        throttle_time_ms=0, groups=[_described(asked.group_id, groups.get(asked.group_id)) for asked in request.groups]
    )


def _described(group_id: str, group: ShareGroup | None) -> Any:
    if group is None:
        return _Group(group_id=group_id, topics=[], error_code=GROUP_ID_NOT_FOUND, error_message="gone")
    topics = [
        _Topic(
            topic_name=str(topic_id),
            topic_id=topic_id,
            partitions=[
                _Partition(
                    partition_index=index, start_offset=start, leader_epoch=0, lag=-1, error_code=0, error_message=None
                )
            ],
        )
        for (topic_id, index), start in group.starts.items()
    ]
    return _Group(group_id=group_id, topics=topics, error_code=0, error_message=None)


def with_group_error(error_code: int) -> Callable[[Any], None]:
    def edit(response: Any) -> None:
        for group in response.groups:
            group.error_code, group.topics = error_code, []

    return edit


def with_partition_error(error_code: int, topic_id: UUID) -> Callable[[Any], None]:
    def edit(response: Any) -> None:
        for group in response.groups:
            for topic in group.topics:
                if topic.topic_id == topic_id:
                    for one in topic.partitions:
                        one.error_code, one.start_offset = error_code, -1

    return edit
