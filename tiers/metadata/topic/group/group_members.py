"""Reads from the owners' group which process owns which metadata partitions, for commands, which are no members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafka.protocol.admin import DescribeGroupsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.metadata.topic.group.assignor import Subscription, decode_assignment, decode_subscription
from tiers.metadata.topic.metadata_producer import GROUP_COORDINATOR, find_coordinator
from tiers.metadata.topic.settings import metadata_group_id

_NOT_YET: Final = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
"""The first answers of a cluster in which this is the first group."""
_AGAIN_MS: Final = 100


@dataclass(frozen=True, slots=True)
class OwnerMember:
    """A member of the group. `metadata_partitions` are those that the group assigned to it.

    They are empty during a rebalance. `is_fit` and `settings` are what the member declared when it joined."""

    member_id: str
    host: str
    metadata_partitions: frozenset[int]
    is_fit: bool
    settings: str = ""

    @property
    def name(self) -> str:
        return f"{self.host} ({self.member_id})"


async def group_members(client: BrokerClient, topic_name: str, timeout_ms: int) -> Sequence[OwnerMember]:
    """Returns the members of the group that owns the metadata partitions of the topic. Raises `BrokerError`.

    A member that died counts until its session ends."""
    group_id = metadata_group_id(topic_name)
    message = DescribeGroupsRequest(groups=[group_id], include_authorized_operations=False)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while True:
                coordinator = await find_coordinator(client, group_id, GROUP_COORDINATOR, timeout_ms)
                response: Any = await client.request(coordinator, message, timeout_ms, max_version=5)
                [group] = response.groups
                if group.error_code not in _NOT_YET:
                    break
                await asyncio.sleep(_AGAIN_MS / 1000)
    except TimeoutError as error:
        raise BrokerError(f"group {group_id} was not described in {timeout_ms} ms", retriable=True) from error
    if group.error_code != ErrorCode.NONE:
        raise BrokerError(f"group {group_id} cannot be described", group.error_code)
    return [_member(member, topic_name) for member in group.members]


def _member(member: Any, topic_name: str) -> OwnerMember:
    try:
        assigned = decode_assignment(member.member_assignment or b"", topic_name).metadata_partitions
        said = decode_subscription(member.member_metadata) if member.member_metadata else Subscription()
    except RemoteLogMetadataError:  # a member of a later release: what it owns is not known
        assigned, said = frozenset(), Subscription()
    host = str(member.client_host).removeprefix("/")
    return OwnerMember(member.member_id, host, assigned, said.is_fit, said.settings)
