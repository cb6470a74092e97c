"""`RLMClampTask`: before anything else in a round, the tier is made to agree with the leader's log (DESIGN, rule 2).

What an unclean election cut off is only recorded, in one record: the objects stay until an operator has them deleted.
"""

from __future__ import annotations

import logging

from tiers.errors import LogDivergedError, OwnershipLostError
from tiers.manager.lineage import check_remote_lineage, find_common_end
from tiers.manager.task_services import TaskServices
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogClampUpdate

_LOG = logging.getLogger(__name__)


class RLMClampTask:
    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition

    async def run(self, local_log_start: int, log_start: int | None) -> bool:
        """Clamps the tier if the leader's log ends earlier. Returns True when the tier was clamped.

        After a clamp, the caller must discard what its tasks remember of the tier. The caller has just read
        `local_log_start`. `log_start` is the recorded one that the leader confirms.

        Raises `LogDivergedError` when the partition must stop."""
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        is_clamped = False
        try:
            await check_remote_lineage(
                services.source, services.metadata, partition, local_log_start, log_start, timeout_ms
            )
        except LogDivergedError:
            await self._clamp(log_start)
            # Once more against what is remote now: nobody knows whom the leader changed to meanwhile.
            await check_remote_lineage(
                services.source, services.metadata, partition, local_log_start, log_start, timeout_ms
            )
            is_clamped = True
        return is_clamped

    async def _clamp(self, log_start: int | None) -> None:
        services, partition = self._services, self._partition
        remote_end = services.metadata.remote_end_offset(partition)
        trimmed_to = services.metadata.local_log_start(partition)
        common = await find_common_end(
            services.source,
            services.metadata,
            partition,
            None if trimmed_to is None else trimmed_to.offset,
            log_start,
            services.settings.request_timeout_ms,
        )
        if not services.metadata.owns(partition):
            raise OwnershipLostError(f"{partition} is owned by another member")
        if common.offset == remote_end:
            return  # the leader changed back: it confirms everything
        clamp = RemoteLogClampUpdate(partition, "", services.wall_clock_ms(), common.leader_epoch, common.offset)
        await services.metadata.put_remote_log_clamp(clamp)
        services.checkpoint("clamp-written")
        services.metrics.clamps.labels(partition.topic).inc()
        services.metrics.alarms.labels(partition.topic, "clamped").inc()
        _LOG.error(
            "another leader's records took the place of what was copied; what they replace is in quarantine",
            extra={"partition": str(partition), "valid_end_offset": common.offset, "remote_end": remote_end},
        )
