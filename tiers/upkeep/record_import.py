"""Lets a command write many records into the metadata topic: rebuilt ones, or those of a file.

The records are written in transactions, as an owner's are, since readers ignore them otherwise. A running owner might
write about the same partitions at the same time, so no owner may run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafka.protocol.admin import DescribeGroupsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import BrokerError
from tiers.metadata.topic.metadata_producer import (
    GROUP_COORDINATOR,
    KeyAndValue,
    TransactionalProducer,
    find_coordinator,
)
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import metadata_group_id

RECORDS_PER_TRANSACTION = 500

_NOT_YET = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
"""The first answers of a cluster in which this is the first group."""
_AGAIN_MS = 100


async def count_owners(client: BrokerClient, topic_name: str, timeout_ms: int) -> int:
    """Returns the number of members of the group that owns the metadata partitions. Raises `BrokerError`.

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
    return len(group.members)


async def write_records(
    client: BrokerClient,
    topic: MetadataTopic,
    records: Mapping[int, Sequence[KeyAndValue]],
    timeout_ms: int,
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes `records`, which are ordered lists by metadata partition. `timeout_ms` limits each transaction.

    Raises `RemoteLogMetadataError`; then some of the records may be written."""
    for metadata_partition, of_partition in records.items():
        transactional_id = f"{metadata_group_id(topic.name)}-import-{metadata_partition}"
        producer = TransactionalProducer(client, topic, metadata_partition, transactional_id, clock_ms=monotonic_ms)
        await producer.initialize(timeout_ms)
        for first in range(0, len(of_partition), RECORDS_PER_TRANSACTION):
            batch = of_partition[first : first + RECORDS_PER_TRANSACTION]
            await producer.commit(batch, None, -1, timeout_ms)
            on_written(len(batch))
