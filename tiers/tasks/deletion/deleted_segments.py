"""`DeletedSegmentsTask` deletes the objects of deleted segments once more, and forgets these segments.

A process that was paused in the middle of a copy may send its PUT long after another owner deleted the segment. A copy
gives up after half of `remote.log.deleted.segment.retention.ms`. So hardly any PUT arrives after the whole time, and a
second deletion removes what came late. Only then the metadata forgets the segment (docs/design.md, "Objects").

The task works on every partition that this process owns, also of topics that are deleted or not tiered any more.
"""

from __future__ import annotations

import logging
from collections import defaultdict

from tiers.bounded_gather import bounded_gather
from tiers.errors import CircuitOpenError, RemoteStorageError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.task_services import TaskServices

_DELETIONS_AT_ONCE = 8
_FORGOTTEN_AT_ONCE = 100
logger = logging.getLogger(__name__)


class DeletedSegmentsTask:
    def __init__(self, services: TaskServices) -> None:
        self._services = services

    async def run(self) -> int:
        """Returns how many segments were forgotten. Raises the first error of the store after the run.

        A segment whose objects cannot be deleted stays for the next run, and holds up no other segment. While a circuit
        breaker is open, the run ends. Raises the errors of the metadata manager at once."""
        services = self._services
        retention_ms = services.settings.remote_log.deleted_segment_retention_ms
        max_skew_ms = services.settings.max_clock_skew_ms
        latest_ms = services.wall_clock_ms() + max_skew_ms - retention_ms
        deleted: dict[TopicIdPartition, list[RemoteLogSegmentMetadata]] = defaultdict(list)
        for segment in services.state.deleted_segments(until_ms=latest_ms):
            if services.log.owns(segment.topic_id_partition):
                deleted[segment.topic_id_partition].append(segment)
        forgotten, troubles = 0, list[RemoteStorageError]()
        for partition, candidates in deleted.items():
            skew_ms = await services.metadata.clock_skew_ms(partition)
            if abs(skew_ms) > max_skew_ms:
                continue
            # The time of a deletion is that of the brokers' clock.
            until_ms = services.wall_clock_ms() + skew_ms - retention_ms
            segments = [one for one in candidates if one.event_timestamp_ms <= until_ms]
            if segments:
                await services.place.require(services, segments)  # another place has no late objects
            for first in range(0, len(segments), _FORGOTTEN_AT_ONCE):
                forgotten += await self._forget(partition, segments[first : first + _FORGOTTEN_AT_ONCE], troubles)
                if troubles and isinstance(troubles[-1], CircuitOpenError):
                    raise troubles[0]
        if troubles:
            raise troubles[0]
        return forgotten

    async def _forget(
        self, partition: TopicIdPartition, segments: list[RemoteLogSegmentMetadata], troubles: list[RemoteStorageError]
    ) -> int:
        services = self._services

        async def delete_again(segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentId | None:
            services.require_ownership(partition)
            if services.state.remote_log_segment_metadata_by_id(segment.segment_id) is not None:
                return None  # a job announced it again since the list was made, and decides about it
            if troubles and isinstance(troubles[-1], CircuitOpenError):
                return None
            try:
                is_gone = await services.storage.delete_log_segment_data(segment)
            except RemoteStorageError as error:
                troubles.append(error)
                return None
            return segment.segment_id if is_gone else None

        done = await bounded_gather(segments, delete_again, _DELETIONS_AT_ONCE)
        gone = [segment_id for segment_id in done if segment_id is not None]
        if gone:
            services.require_ownership(partition)
            await services.metadata.forget_deleted_segments(gone)
            services.checkpoint("deleted-segments-forgotten")
            logger.debug("deleted segments are forgotten", extra={"partition": str(partition), "segments": len(gone)})
        return len(gone)
