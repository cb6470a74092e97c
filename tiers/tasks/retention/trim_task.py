"""`TrimTask` trims the local tier: DeleteRecords up to the local retention target.

See docs/design.md, safety rules 1, 2 and 4.

* It trims only a prefix of the local log that the remote tier covers without a gap, and only segments that this
  process's own reader saw finished T_vis ago or earlier. The newest segment always stays local.
* Right before the trim, the store has the marker of the tier and the objects of each segment, and the keys of this
  process open them. Days may lie between the copy and the trim.
* The topic's tier settings are read to their end, and once more after the end of the trim is recorded: that write may
  wait for a takeover. If the policy was made of others, or was replaced, nothing is trimmed.
* The end of a trim is recorded before the trim begins. After any restart, lost metadata is recognised by it.
* It removes no record above the LSO or above the start of a share group: share groups read from the broker alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import takewhile

from tiers.bounded_gather import bounded_gather
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import RemoteLogMetadataNotReadyError, RemoteStorageError
from tiers.metadata.log_history import confirms
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.history.align import require_aligned
from tiers.tasks.hold import TrimView, trim_hold, trim_holds
from tiers.tasks.task_services import TaskServices
from tiers.verify.read_back import check_stored

_CHECKS_AT_ONCE = 8
logger = logging.getLogger(__name__)


class TrimTask:
    def __init__(
        self,
        services: TaskServices,
        topic_id_partition: TopicIdPartition,
        is_in_effect: Callable[[TopicPolicy], bool] = lambda policy: True,
    ) -> None:
        """Constructs the task. `is_in_effect` tells whether a policy that the task began with is still the topic's."""
        self._services = services
        self._partition = topic_id_partition
        self._is_in_effect = is_in_effect

    async def run(
        self,
        policy: TopicPolicy,
        checked_epoch: int | None = None,
    ) -> int | None:
        """Trims the local log. Returns the local log start after the trim, None when there was nothing to trim.

        `checked_epoch` is the leader epoch whose log was compared. Another leader trims nothing; None: any leader does.
        Raises the store's error when the store lacks the first segment, or is another place than that of the tier."""
        if trim_hold(policy) is not None:
            return None
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        bounds = await services.source.bounds(partition, timeout_ms)
        if checked_epoch not in (None, bounds.leader_epoch):
            return None
        target = self.target(policy, bounds)
        if target <= bounds.log_start_offset:
            return None
        share_start = await services.share_groups.lowest_start(partition, timeout_ms)
        if share_start is not None and share_start < target:
            target = share_start
            if target <= bounds.log_start_offset:
                return None
        await require_aligned(services.source, services.state, partition, bounds, timeout_ms)
        target = await self._stored_to(bounds.log_start_offset, target)
        if not await self._has_present_settings(policy):
            return None
        await self._record(OffsetAndEpoch(target, bounds.leader_epoch))
        services.checkpoint("trim-decided")
        # The write may have waited for the ownership, while a user changed the settings.
        if not await self._has_present_settings(policy):
            return None
        low_watermark = await services.source.delete_records(
            partition, target, bounds.leader_epoch, timeout_ms, partial(self._check, policy)
        )
        services.checkpoint("trimmed")
        services.metrics.trimmed_offsets.labels(partition.topic).inc(max(0, low_watermark - bounds.log_start_offset))
        logger.info(
            "the local tier was trimmed", extra={"partition": str(partition), "log_start_offset": low_watermark}
        )
        return low_watermark

    async def _stored_to(self, local_log_start: int, target: int) -> int:
        """Returns the end of the segments before `target` that the store has now, without a gap between them.

        Raises `RemoteStorageError` if it lacks the first one."""
        services = self._services
        covering = covering_segments(services.state, self._partition, local_log_start)
        segments = [*takewhile(lambda segment: segment.start_offset < target, covering)]
        await services.place.require(services, segments)

        async def trouble_with(segment: RemoteLogSegmentMetadata) -> RemoteStorageError | None:
            try:
                await check_stored(services.storage, segment, services.key_ring)
            except RemoteStorageError as error:
                return error
            return None

        troubles = await bounded_gather(segments, trouble_with, _CHECKS_AT_ONCE)
        for segment, trouble in zip(segments, troubles, strict=True):
            if trouble is None:
                continue
            if segment.start_offset <= local_log_start:
                raise RemoteStorageError(
                    f"segment {segment.segment_id.id} was copied, but cannot be read now, so the brokers keep its"
                    f" records: {trouble}"
                ) from trouble
            return segment.start_offset
        return target

    async def _record(self, target: OffsetAndEpoch) -> None:
        """Records the end of the trim, unless a later trim of this history is recorded.

        A later one can be recorded if a broker lost its log start."""
        services, partition = self._services, self._partition
        known = services.state.local_log_start(partition)
        timeout_ms = services.settings.request_timeout_ms
        is_known = known is not None and known.offset >= target.offset
        if known is None or not is_known or not await confirms(services.source, partition, known, timeout_ms):
            await services.metadata.put_local_log_start(partition, target)

    async def _has_present_settings(self, policy: TopicPolicy) -> bool:
        """Whether the policy is made of the topic's tier settings, which are read to their end, and is in effect.

        Raises `RemoteLogMetadataNotReadyError` when they cannot be read to their end now."""
        tier_settings = await self._services.present_tier_settings(self._partition)
        if tier_settings == policy.tier_settings and self._is_in_effect(policy):
            return True
        logger.info("the tier settings were changed: nothing is trimmed now", extra={"partition": str(self._partition)})
        return False

    def _check(self, policy: TopicPolicy) -> None:
        """Called right before each request, since a trim may be repeated for long.

        Checks the ownership, and the settings as far as they are read."""
        services, partition = self._services, self._partition
        services.require_ownership(partition)
        if services.state.topic_tier_config(partition.topic_id) != policy.tier_settings or not self._is_in_effect(
            policy
        ):
            raise RemoteLogMetadataNotReadyError(
                f"the tier settings of {partition.topic} were changed meanwhile: nothing is trimmed now"
            )

    def target(self, policy: TopicPolicy, bounds: LocalLogBounds) -> int:
        """Returns the offset to trim to; the local log start if nothing may be trimmed."""
        services = self._services
        covering = covering_segments(services.state, self._partition, bounds.log_start_offset)
        view = TrimView(
            bounds.last_stable_offset,
            services.wall_clock_ms(),
            services.settings.remote_log.visible_after_ms,
            self._visible_for_ms,
        )
        target = bounds.log_start_offset
        for segment, hold in trim_holds(policy, covering, view):
            if hold is not None:
                break
            target = segment.valid_end_offset + 1
        return target

    def _visible_for_ms(self, segment: RemoteLogSegmentMetadata) -> int | None:
        seen_at_ms = self._services.state.seen_at_ms(segment.segment_id)
        return None if seen_at_ms is None else self._services.clock_ms() - seen_at_ms


def covering_segments(
    metadata: RemoteLogMetadataState, partition: TopicIdPartition, offset: int
) -> list[RemoteLogSegmentMetadata]:
    """Returns the readable segments from the one that holds `offset` up to the first gap."""
    covering: list[RemoteLogSegmentMetadata] = []
    while (segment := metadata.remote_log_segment_metadata(partition, offset)) is not None:
        covering.append(segment)
        offset = segment.valid_end_offset + 1
    return covering
