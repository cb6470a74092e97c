"""DescribeShareGroupOffsets (KIP-932): the start offsets of a share group, or -1 before the first acknowledgement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tiers.broker.share_groups import DescribeShareGroupOffsetsRequest, DescribeShareGroupOffsetsResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = DescribeShareGroupOffsetsRequest
GROUP_ID_NOT_FOUND = 69
_Group = DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseGroup
_Topic = _Group.DescribeShareGroupOffsetsResponseTopic
_Partition = _Topic.DescribeShareGroupOffsetsResponsePartition


@dataclass(frozen=True)
class ShareGroup:
    group_id: str
    state: str = "Stable"
    starts: Mapping[tuple[UUID, int], int] = field(default_factory=dict)


async def answer(broker: ScriptedBroker, request: Any) -> Any:
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
