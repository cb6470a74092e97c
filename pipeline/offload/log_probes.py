"""Where batches end: an offload asks the brokers before it cuts tiles. Each request reads one batch."""

from __future__ import annotations

from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
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
