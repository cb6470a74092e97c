"""`UncopiedHeads`: how old the first records that are not remote are, as the owner of their partition knows it."""

from __future__ import annotations

import logging

from protocol.records.record_batch import RecordBatch, iterate_batches
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


def timestamp_of(batch: RecordBatch) -> int | None:
    timestamp_ms = batch.max_timestamp if batch.is_log_append_time else batch.base_timestamp
    return timestamp_ms if timestamp_ms >= 0 else None


class UncopiedHeads:
    """The offsets from which records are not remote. The batch at each of them is read once, for its timestamp."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._since_ms: dict[int, int] = {}
        self._timestamps_ms: dict[int, int | None] = {}
        self._leader_epoch = -1

    def keep_from(self, offset: int, leader_epoch: int) -> None:
        """Drops the offsets below `offset`, and the timestamps of another leader epoch.

        Other records may have the offsets then."""
        if self._leader_epoch not in (leader_epoch, -1):
            self._timestamps_ms.clear()
        self._leader_epoch = leader_epoch
        for known in (self._since_ms, self._timestamps_ms):
            for at in [at for at in known if at < offset]:
                del known[at]

    def known_for_ms(self, offset: int) -> int:
        """Returns how long this owner has known a record at `offset`, which is not remote."""
        now_ms = self._services.clock_ms()
        return now_ms - self._since_ms.setdefault(offset, now_ms)

    def timestamp_ms(self, offset: int) -> int | None:
        """Returns the timestamp of the batch at `offset`. None: it has none, or was not read."""
        return self._timestamps_ms.get(offset)

    async def look(self, offset: int) -> int | None:
        """Reads the batch at `offset`, unless it was read. Returns its timestamp, None while it cannot be read."""
        services, partition = self._services, self._partition
        if offset not in self._timestamps_ms:
            try:
                read = await services.source.read(partition, offset, 1, services.settings.request_timeout_ms)
                batch = next(iterate_batches(read.records), None)
                if batch is not None:
                    self._timestamps_ms[offset] = timestamp_of(batch)
            except RemoteLogError as error:
                fields = {"partition": str(partition), "error": str(error)}
                logger.debug("the first record that is not copied cannot be read", extra=fields)
        return self._timestamps_ms.get(offset)
