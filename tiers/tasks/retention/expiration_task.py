"""`RLMExpirationTask` applies the total retention over both tiers, and the log start (docs/semantics.md 9.4).

* The tier's log start moves before segments are deleted, so a client is never offered a segment in deletion.
* Records that a CUT voids count for no bytes. They are deleted when the total retention in time has passed since the
  CUT: they may exist nowhere else, and the log start is of another history.
* Time is that of the brokers (docs/design.md, safety rule 6). Too much skew stops every expiry.
* Before anything expires, the topic's tier settings are read to their end, and compared once more right before the
  write of the log start, which may have to wait. If the policy was made of others, or was replaced, nothing expires.
* As in Kafka, a record with a timestamp in the future keeps its segment and all later ones. So do records below a
  segment that are not known to be remote: those of an attempt, of the broker alone, or of a copy that was lost.
* If two copies of a range exist, the copy that answers for no offset is deleted too (KAFKA-16511). Right before that,
  the owner looks whether the store still has the copies that answer.
* If a broker's log start went back (unclean stop), the task tells the broker again to delete the records, unless its
  leader disproves the recorded log start. The start of the remote tier alone is no reason to delete records.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import takewhile

from tiers.bounded_gather import in_turns
from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import Retention
from tiers.errors import RemoteLogMetadataNotReadyError, RemoteStorageError
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.deletion.segment_deletion import try_to_delete
from tiers.tasks.hold import expiry_hold, expiry_holds, is_held_by_future_timestamp
from tiers.tasks.task_services import TaskServices
from tiers.texts import moment_text
from tiers.verify.read_back import check_stored

logger = logging.getLogger(__name__)
_SEGMENTS_OF_A_TURN = 256


class RLMExpirationTask:
    def __init__(
        self,
        services: TaskServices,
        topic_id_partition: TopicIdPartition,
        is_in_effect: Callable[[TopicPolicy], bool] = lambda policy: True,
        policy_as_of_ms: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        """Constructs the task. `is_in_effect` tells whether a policy that the task began with is still the topic's.

        `policy_as_of_ms` returns when (wall clock) the brokers were asked for the policy. Records that were due only
        later stay: the retention may have been raised since."""
        self._services = services
        self._partition = topic_id_partition
        self._is_in_effect = is_in_effect
        self._policy_as_of_ms = policy_as_of_ms

    async def run(
        self,
        policy: TopicPolicy,
        bounds: LocalLogBounds,
        log_start: int,
        local_only_bytes: int,
        remote_end: int | None,
    ) -> int:
        """Moves the log start, and applies it to the broker. Needs no store. Returns the new log start.

        The caller has compared the remote records up to `remote_end` (inclusive) with the log of the leader of
        `bounds`. None: there were none. A later record may have another history, so it does not expire yet: the broker
        would delete its own records at the same offsets."""
        log_start = await self.expire(policy, bounds, log_start, local_only_bytes, remote_end)
        await self.apply_log_start(bounds, log_start)
        return log_start

    async def delete(
        self,
        policy: TopicPolicy,
        log_start: int,
        may_delete: Callable[[], bool] = lambda: True,
    ) -> int:
        """Deletes the segments below the log start, the superseded ones, and the void ones that have expired.

        Returns how many were deleted.

        The store must be the place of the tier. A superseded segment stays while the store lacks one of the segments
        that answer for its offsets. The method raises the store's error for that, after all other deletions. It ends
        when `may_delete` returns False, and when the topic's settings change."""
        void = await self._expired_void(policy, log_start)
        superseded = self._superseded(log_start)
        deletable = [*self._below(log_start), *superseded, *void]
        if not deletable:
            return 0
        await self._services.place.require(self._services, deletable)
        looked: dict[RemoteLogSegmentId, RemoteStorageError | None] = {}
        troubles: list[RemoteStorageError] = []

        async def is_needless(segment: RemoteLogSegmentMetadata) -> bool:
            for other in superseded.get(segment, ()):
                if other.segment_id not in looked:
                    looked[other.segment_id] = await self._trouble_of(other)
                if (error := looked[other.segment_id]) is not None:
                    said = f"segment {segment.segment_id.id} stays: segment {other.segment_id.id} has its offsets"
                    troubles.append(RemoteStorageError(f"{said}, but cannot be read now: {error}"))
                    return False
            return True

        def is_present(segment: RemoteLogSegmentMetadata) -> bool:
            """Whether the settings are those that the list was made by: a user may pause expiring meanwhile."""
            settings = self._services.state.topic_tier_config(self._partition.topic_id)
            return may_delete() and self._is_present(policy, settings)

        deleted = await self._delete(takewhile(is_present, deletable), is_needless)
        if deleted and log_start:
            await self._services.local_indexes.remove_below(self._partition, log_start)
        if troubles:
            raise troubles[0]
        return deleted

    async def _trouble_of(self, segment: RemoteLogSegmentMetadata) -> RemoteStorageError | None:
        """Returns why the store cannot answer for the segment; None: it can.

        The copy of another machine or of another day may be gone, or may never have been in this place."""
        try:
            await check_stored(self._services.storage, segment, self._services.key_ring)
        except RemoteStorageError as error:
            return error
        return None

    async def _expired_void(self, policy: TopicPolicy, log_start: int) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments that a CUT voids from the log start on, once the retention has passed since then."""
        if policy.retention_ms < 0 or expiry_hold(policy):
            return []
        cuts = self._services.state.cuts(self._partition)
        expired_at_ms = self._judged_as_of_ms() - policy.retention_ms
        found = [
            each
            for each in self._finished_apart()
            if (each.is_cut_off or (each.cut_at is not None and each.valid_end_offset < log_start))
            and max(cut.at_ms for cut in cuts if cut.leader_epoch > each.leader_epoch) < expired_at_ms
        ]
        if found and await self._clock_is_trusted() and await self._settings_still_expire(policy):
            return found
        return []

    async def expire(
        self,
        policy: TopicPolicy,
        bounds: LocalLogBounds,
        log_start: int,
        local_only_bytes: int,
        remote_end: int | None,
    ) -> int:
        """Moves the log start, and returns the new one.

        `log_start` is the one that the leader of `bounds` keeps. `remote_end` is as in `run`."""
        services, partition, local_log_start = self._services, self._partition, bounds.log_start_offset
        expired_to = self._expired_to(policy, log_start, local_log_start, local_only_bytes)
        expired_to = min(expired_to, log_start if remote_end is None else max(log_start, remote_end + 1))
        if expired_to <= log_start:
            services.metrics.alarms.end(*self._skew_alarm)  # the clocks hold nothing up now
        elif await self._clock_is_trusted() and await self._settings_still_expire(policy):
            # The clock may have been set since the first judgement, so the records are judged again.
            expired_to = min(expired_to, self._expired_to(policy, log_start, local_log_start, local_only_bytes))
        else:
            expired_to = log_start
        self._watch_head(policy, max(log_start, expired_to))
        if expired_to > log_start:
            self._check_ownership()
            last_epoch = RemoteLog(services.state, partition).epoch_at(expired_to - 1)
            expired = LogStart(expired_to, bounds.leader_epoch, LogStartReason.RETENTION, last_epoch)
            await services.metadata.put_log_start(partition, expired, check=partial(self._check_settings, policy))
            logger.info(
                "records expired by the total retention",
                extra={"partition": str(partition), "log_start_offset": expired_to, "before": log_start},
            )
            services.checkpoint("log-start-raised")
        return expired_to

    def _watch_head(self, policy: TopicPolicy, log_start: int) -> None:
        """Raises an alarm while a timestamp in the future keeps the first segment, and with it the later ones."""
        services, now_ms, partition = self._services, self._services.wall_clock_ms(), self._partition
        alarms, alarm = services.metrics.alarms, (partition.topic, AlarmReason.FUTURE_TIMESTAMP, str(partition))
        head = None if expiry_hold(policy) else next(self._answering(log_start), None)
        if head is None or not is_held_by_future_timestamp(head, policy.retention_ms, now_ms):
            alarms.end(*alarm)
            return
        said = f"a record of the offsets {head.start_offset} to {head.valid_end_offset}"
        timestamp = moment_text(head.max_timestamp_ms)
        if alarms.begin(*alarm, f"{said} has the timestamp {timestamp}"):
            fields = {"partition": str(partition), "records": said, "timestamp": timestamp}
            logger.error("a timestamp in the future keeps records from expiring", extra=fields)

    def _finished_apart(self) -> list[RemoteLogSegmentMetadata]:
        """Returns the finished segments of which other copies or CUTs have replaced a part at least."""
        return [each.metadata for each in self._services.state.segments_apart(self._partition) if each.is_finished]

    async def _newest_ms(self) -> int:
        """Returns the time of the newest record of a finished segment. Looks at all of them, in short turns."""
        newest_ms = 0
        async for each in in_turns(self._services.state.stored_segments(self._partition), _SEGMENTS_OF_A_TURN):
            newest_ms = max(newest_ms, each.event_timestamp_ms if each.is_finished else 0)
        return newest_ms

    @property
    def _skew_alarm(self) -> tuple[str, AlarmReason, str]:
        return self._partition.topic, AlarmReason.CLOCK_SKEW, str(self._partition)

    async def _clock_is_trusted(self) -> bool:
        """Returns whether the clocks' skew is within the limit.

        A record with a time in the future shows that this machine's clock is behind. `clock_skew_ms` measures the skew
        in both directions."""
        services, limit_ms = self._services, self._services.settings.max_clock_skew_ms
        newest_ms = await self._newest_ms()
        measured_ms = await services.metadata.clock_skew_ms(self._partition)
        if abs(measured_ms) > limit_ms:
            measured_ms = await services.metadata.clock_skew_ms(self._partition, anew=True)
        skew_ms = max(0, newest_ms - services.wall_clock_ms(), abs(measured_ms))
        if skew_ms <= limit_ms:
            services.metrics.alarms.end(*self._skew_alarm)
            return True
        if services.metrics.alarms.begin(*self._skew_alarm, f"the clocks differ by {skew_ms} ms"):
            logger.error(
                "nothing expires while this machine's clock and the brokers' clock differ: synchronize the clocks",
                extra={"partition": str(self._partition), "skew_ms": skew_ms},
            )
        return False

    async def _settings_still_expire(self, policy: TopicPolicy) -> bool:
        """Returns whether the topic still has this policy and the settings that it was made of.

        Raises `RemoteLogMetadataNotReadyError` when the topic's tier settings cannot be read to their end now."""
        if self._is_present(policy, await self._services.present_tier_settings(self._partition)):
            return True
        fields = {"partition": str(self._partition)}
        logger.info("the retention settings were changed: nothing expires now", extra=fields)
        return False

    def _check_settings(self, policy: TopicPolicy) -> None:
        """Checks the settings again, as far as they are read, while the write of the log start has waited.

        Raises `RemoteLogMetadataNotReadyError` if they were changed: the next round has the present policy."""
        partition = self._partition
        if not self._is_present(policy, self._services.state.topic_tier_config(partition.topic_id)):
            raise RemoteLogMetadataNotReadyError(
                f"the retention settings of {partition.topic} were changed meanwhile: nothing expires now"
            )

    def _is_present(self, policy: TopicPolicy, tier_settings: Mapping[str, str]) -> bool:
        return tier_settings == policy.tier_settings and self._is_in_effect(policy)

    def _expired_to(self, policy: TopicPolicy, log_start: int, local_log_start: int, local_only_bytes: int) -> int:
        """Returns the log start that retention asks for, at least `log_start`.

        It is limited by the bytes that one run may expire."""
        if expiry_hold(policy):
            return log_start
        remote = RemoteLog(self._services.state, self._partition)
        if remote.is_head_unknown(log_start, local_log_start):
            return log_start
        alive, retention = self._answering(log_start), Retention(policy.retention_ms, policy.retention_bytes)
        now_ms, budget_bytes = self._judged_as_of_ms(), self._services.settings.expire_max_bytes_per_run
        alive_bytes, end, next_offset = self._retained_bytes(log_start), log_start, log_start
        for segment, hold in expiry_holds(alive, retention, now_ms, local_only_bytes, budget_bytes, alive_bytes):
            if next_offset > log_start and segment.start_offset > remote.gone_to(next_offset, local_log_start):
                return end  # a hole lies before this segment, and the segment before the hole shows it
            end = next_offset
            if hold is not None:
                return end
            next_offset = max(next_offset, segment.valid_end_offset + 1)
        return next_offset

    def _judged_as_of_ms(self) -> int:
        return min(self._services.wall_clock_ms(), self._policy_as_of_ms())

    def _retained_bytes(self, log_start: int) -> int | None:
        """Returns the retained bytes of the segments that answer from `log_start` on.

        None: some of them overlap, or the metadata has changed meanwhile."""
        metadata, partition = self._services.state, self._partition
        size = metadata.cover_size(partition)
        if not all(each.is_cut_off or self._answers_alone(each) for each in self._finished_apart()):
            return None
        below = takewhile(lambda each: each.valid_end_offset < log_start, self._answering(0))
        alive_bytes = size.whole_bytes - sum(each.retained_bytes for each in below)
        return alive_bytes if metadata.cover_size(partition) == size else None

    def _answers_alone(self, segment: RemoteLogSegmentMetadata) -> bool:
        """Whether no other copy has any of the offsets that CUTs left of a segment."""
        runs = self._services.state.answered_offsets(self._partition, segment.start_offset)
        is_one = next(runs, None) == (segment.start_offset, segment.valid_end_offset + 1)
        return is_one and self._services.state.next_segment(self._partition, segment.start_offset) == segment

    def _answering(self, offset: int) -> Iterator[StoredSegment]:
        """Yields the segments that answer for the offsets from `offset` on.

        Of two copies of a range it yields one, since the range must not count twice."""
        return self._services.state.answering_segments(self._partition, offset)

    def _below(self, log_start: int) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments whose records all lie below the log start, except for what a CUT voids."""
        segments = self._services.state.stored_segments(self._partition)
        below = takewhile(lambda each: each.start_offset < log_start, segments)
        found = [each.metadata for each in below if each.is_finished and each.end_offset < log_start]
        return [each for each in found if each.cut_at is None]

    def _superseded(self, log_start: int) -> dict[RemoteLogSegmentMetadata, list[RemoteLogSegmentMetadata]]:
        """Returns the copies from the log start on that are not needed, each with the segments that have its offsets.

        Every proxy has had the time to see these segments."""
        services, looked_to = self._services, log_start - 1
        visible_since_ms = services.clock_ms() - services.settings.remote_log.visible_after_ms
        found: dict[RemoteLogSegmentMetadata, list[RemoteLogSegmentMetadata]] = {}
        for apart in self._finished_apart():
            if apart.cut_at is not None or apart.end_offset <= looked_to:
                continue
            copies = self._overlapping(apart.start_offset)
            looked_to = max(each.end_offset for each in copies)
            answering = self._answering_within(copies[0].start_offset, looked_to)
            seen_at_ms = [services.state.seen_at_ms(each.segment_id) for each in answering]
            is_visible = all(at is not None and at <= visible_since_ms for at in seen_at_ms)
            if not is_visible:
                continue
            needed, ends = {each.segment_id for each in answering}, [each.valid_end_offset for each in answering]
            for each in copies:
                if each.segment_id not in needed and each.end_offset >= log_start:
                    first, last = bisect_left(ends, each.start_offset), bisect_left(ends, each.end_offset)
                    found[each] = answering[first : last + 1]
        return found

    def _overlapping(self, offset: int) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments that overlap the one at `offset`, and one another, by ascending start offset.

        No other segment has any of their offsets. Those that a CUT cuts do not count."""
        found: list[RemoteLogSegmentMetadata] = []
        end = offset
        for each in self._services.state.list_remote_log_segments(self._partition, offset):
            if each.start_offset > end:
                break
            if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED and each.cut_at is None:
                found.append(each)
                end = max(end, each.end_offset)
        return found

    def _answering_within(self, first: int, last: int) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments that answer for the offsets from `first` to `last`."""
        return [each.metadata for each in takewhile(lambda each: each.start_offset <= last, self._answering(first))]

    async def _delete(
        self,
        segments: Iterable[RemoteLogSegmentMetadata],
        is_needless: Callable[[RemoteLogSegmentMetadata], Awaitable[bool]],
    ) -> int:
        deleted = 0
        budget_bytes = self._services.settings.expire_max_bytes_per_run
        for segment in segments:
            if deleted and segment.segment_size_bytes > budget_bytes:
                continue
            if not await is_needless(segment):
                continue
            self._check_ownership()
            known = self._services.state.remote_log_segment_metadata_by_id(segment.segment_id)
            if known != segment:
                continue  # another owner cut it off or deleted it meanwhile: the next round judges it again
            if not await try_to_delete(self._services, segment):
                break  # its deletion has begun, and the next round goes on with it
            budget_bytes -= segment.segment_size_bytes
            deleted += 1
        return deleted

    async def apply_log_start(self, bounds: LocalLogBounds, log_start: int) -> None:
        """Tells the broker to delete the records below `log_start`, if it still has any of them.

        `log_start` is the one that the leader of `bounds` keeps (`kept_log_start`)."""
        if not bounds.log_start_offset < log_start <= bounds.last_stable_offset:
            return
        self._check_ownership()
        settings = self._services.settings
        await self._services.source.delete_records(
            self._partition, log_start, bounds.leader_epoch, settings.request_timeout_ms, self._check_ownership
        )
        self._services.checkpoint("log-start-applied")

    def _check_ownership(self) -> None:
        self._services.require_ownership(self._partition)
