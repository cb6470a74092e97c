"""A log of which a broker cannot read one batch."""

from __future__ import annotations

from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.in_memory_log import InMemoryLog
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead


class DamagedLog(InMemoryLog):
    damaged_offset = -1

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        read = await super().read(partition, offset, max_bytes, timeout_ms)
        if any(batch.base_offset == self.damaged_offset for batch in iterate_batches(read.records)):
            raise BrokerError("CRC", ErrorCode.CORRUPT_MESSAGE)
        return read
