"""`delete_disabled` deletes the remote logs of topics that were disabled with deletion (KIP-950).

* The tier's log start moves to the local one first, so a client is never offered a segment in deletion. Then the
  stored facts call every segment dead, so that `rebuild` does not restore any.
* Nothing is deleted while this process still works on the partition, while it may be behind with the topic's settings,
  while an operator pauses expiring, nor from a log that diverged (docs/design.md, safety rule 2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from tiers.bounded_gather import each_alone
from tiers.config.topic_policy import TierWork, paused_work
from tiers.config.topic_settings import is_deletion_requested
from tiers.errors import RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.metadata.log_history import kept_log_start
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.remote_log_metadata_manager import is_log_start_known
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.tasks.deletion.segment_deletion import delete_all, end_copy_plans
from tiers.tasks.history.align import require_aligned, require_no_open_cut
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.task_services import TIER_SETTINGS_MAX_AGE_MS, TaskServices

logger = logging.getLogger(__name__)


async def delete_disabled(services: TaskServices, is_worked_on: Callable[[TopicIdPartition], bool]) -> int:
    """Works once on the partitions that this process owns, and returns how many segments were deleted.

    Raises the first error at the end."""
    troubles = list[Exception]()
    partitions = (
        each
        for each in services.state.partitions()
        if services.log.owns(each) and not is_worked_on(each) and _is_to_go(services, each)
    )
    deleted = await each_alone(partitions, partial(_delete, services), troubles)
    if troubles:
        raise troubles[0]
    return sum(deleted)


def _is_to_go(services: TaskServices, partition: TopicIdPartition) -> bool:
    config = services.state.topic_tier_config(partition.topic_id)
    return is_deletion_requested(config) and TierWork.EXPIRING not in paused_work(config)


async def _delete(services: TaskServices, partition: TopicIdPartition) -> int:
    segments, timeout_ms = (
        list(services.state.list_remote_log_segments(partition)),
        services.settings.request_timeout_ms,
    )
    if not segments:
        await end_copy_plans(services, partition)
        return 0
    await services.log.ensure_fresh(partition, services.settings.remote_log.fresh_within_ms, timeout_ms)
    bounds = await services.source.bounds(partition, timeout_ms)
    await require_aligned(services.source, services.state, partition, bounds, timeout_ms)
    log_start = await kept_log_start(services.source, services.state, partition, timeout_ms)
    require_no_open_cut(services.state, partition, log_start)
    # The user may have taken the request back, and this process may be behind with the topic's settings.
    await services.present_tier_settings(partition)
    # If the metadata lost records, the request to delete may be an old one that the user has taken back since.
    facts, check = FactsTask(services, partition), partial(_check, services, partition)
    await facts.require_proved()
    # A user asked for the deletion. The log is only the local log from now on, so its start is the log start.
    last_epoch = RemoteLog(services.state, partition).epoch_at(bounds.log_start_offset - 1)
    start = LogStart(bounds.log_start_offset, bounds.leader_epoch, LogStartReason.USER, last_epoch)
    is_known = is_log_start_known(services.state, partition, start)
    before, trim = services.state.recorded_log_starts(partition), services.state.local_log_start(partition)
    await services.metadata.put_log_start(partition, start, check=check)
    try:
        # The user may have taken the request back while the record was on its way.
        await services.present_tier_settings(partition)
        check()
    except RemoteLogError:
        if not is_known:
            # Its record has replaced earlier log starts of users, and its end takes the recorded trim with it.
            users = [each for each in before if each.reason is LogStartReason.USER]
            await services.metadata.restore(partition, log_starts=users)
            await services.metadata.end_log_start(partition, start)
            if trim is not None:
                await services.metadata.put_local_log_start(partition, trim)
        raise
    await services.metadata.put_local_log_start(partition, start.position)
    services.checkpoint("log-start-raised")
    await facts.store_dead()
    # If the user takes the request back now, the segments that stay must leave no hole before them: the owner continues
    # to copy at the remote end.
    deleted = await delete_all(services, reversed(segments), check)
    if deleted == len(segments):
        logger.info(
            "the remote log of a topic that is not tiered any more was deleted", extra={"partition": str(partition)}
        )
    return deleted


def _check(services: TaskServices, partition: TopicIdPartition) -> None:
    """Checks the ownership, and that the deletion is still asked for, as far as any proxy has recorded it."""
    services.require_ownership(partition)
    if not services.log.is_fresh(partition.of_settings, TIER_SETTINGS_MAX_AGE_MS):
        raise RemoteLogMetadataNotReadyError(f"the tier settings of {partition.topic} are not read to their end")
    if not _is_to_go(services, partition):
        raise RemoteLogError(f"{partition} is tiered again, or expiring is paused: its remote log is not deleted")
