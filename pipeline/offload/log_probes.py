"""The questions that an offload asks the brokers about their logs before it cuts tiles.

* Where do batches end? Each request reads one batch.
* How large is a log on the disks of its broker (DescribeLogDirs)? The answer is an estimate for the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka.protocol.admin import DescribeLogDirsRequest

from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource


class DamagedLogError(Exception):
    """The batch at `offset` is damaged, so the log cannot be read from there on."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset


async def end_of_batch(source: LogSource, partition: TopicIdPartition, offset: int, timeout_ms: int) -> int | None:
    """Returns the exclusive end of the batch that holds `offset`, or else of the next batch. Returns None if there is
    none below the LSO.

    Raises `DamagedLogError` with the given `offset`, `RemoteLogError`."""
    try:
        read = await source.read(partition, offset, 1, timeout_ms)
    except BrokerError as error:
        if error.code != ErrorCode.CORRUPT_MESSAGE:
            raise
        raise DamagedLogError(offset, str(error)) from error
    return next((batch.next_offset for batch in iterate_batches(read.records)), None)


async def first_damaged(
    source: LogSource, partition: TopicIdPartition, good: int, damaged: DamagedLogError, timeout_ms: int
) -> DamagedLogError:
    """Finds the base offset of a damaged batch by bisection. `damaged` holds an offset within that batch. `good` is a
    lower offset at which a readable batch begins."""
    while good < damaged.offset:
        middle = (good + damaged.offset) // 2
        try:
            end = await end_of_batch(source, partition, middle, timeout_ms)
        except DamagedLogError as error:
            damaged = error
        else:
            good = damaged.offset if end is None else end
    return damaged


_TIMEOUT_MS = 30_000


async def log_sizes(
    client: BrokerClient, partitions: Mapping[int, Mapping[str, list[int]]]
) -> dict[tuple[str, int], int]:
    """Returns bytes by topic and partition. `partitions` is by broker and topic. Brokers that do not answer are left
    out. The brokers also tell nothing to a client without the right to describe the cluster."""
    sizes: dict[tuple[str, int], int] = {}
    for node_id, topics in partitions.items():
        asked = [
            DescribeLogDirsRequest.DescribableLogDirTopic(topic=name, partitions=numbers)
            for name, numbers in topics.items()
        ]
        try:
            answer: Any = await client.request(
                node_id, DescribeLogDirsRequest(topics=asked), _TIMEOUT_MS, min_version=1
            )
        except BrokerError:
            continue
        for folder in answer.results:
            if folder.error_code != ErrorCode.NONE:
                continue
            for topic in folder.topics:
                for one in topic.partitions:
                    if not one.is_future_key:
                        sizes[topic.name, one.partition_index] = one.partition_size
    return sizes
