"""Checks copies that never finished: the only whole copy of a record is not deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.simulation.cluster import CLUSTER_ID, SimPartition
from tests.support.simulation.store import SimStore
from tests.support.simulation.truth import TrueSegment
from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import indexes_key, log_key

if TYPE_CHECKING:
    from tests.support.simulation.oracle import Oracle

_GAP_ENDS_AFTER_S = 12 * 3_600.0
"""When the owner may delete a copy with records of a recorded gap."""


def whole_log(store: SimStore, segment: TrueSegment) -> bytes | None:
    """Returns the records of a segment of which the store has both objects whole; None: it has not."""
    log, indexes = (store.objects.get(key(CLUSTER_ID, segment.metadata)) for key in (log_key, indexes_key))
    is_whole = log is not None and len(log.data) == segment.metadata.segment_size_bytes and _are_readable(indexes)
    return log.data if log is not None and is_whole else None


def _are_readable(indexes: Any) -> bool:
    try:
        return indexes is not None and bool(decode_indexes_object(indexes.data).chunks())
    except CorruptSegmentError:
        return False


def check_deleted(oracle: Oracle, partition: SimPartition, segment: TrueSegment, client: str) -> None:
    """Called before the first object is deleted. Whether the broker still has the records does not matter."""
    records = whole_log(oracle.store, segment)
    if records is None:
        return
    expected, place = oracle.expected[partition], (partition.topic.topic_id, partition.index)
    first, last = segment.metadata.start_offset, segment.metadata.end_offset
    covered = [
        (one.metadata.start_offset, one.metadata.end_offset)
        for one in oracle.truth.finished(place)
        if one is not segment and not one.is_forgotten
    ]
    if oracle.loop.time() - segment.started_at_s >= _GAP_ENDS_AFTER_S:
        covered += [(begin, end - 1) for begin, end in oracle.truth.gaps.get(place, ())]
    for batch in expected.lacking(first, last + 1, oracle.wall_ms()):
        begins_at, ends_at = max(batch.base_offset, first, expected.deleted_to), min(batch.next_offset - 1, last)
        is_covered = any(begin <= begins_at and ends_at <= end for begin, end in covered)
        if batch.data in records and begins_at <= last and not is_covered:
            oracle.fail(
                f"{client} deletes a whole copy of {first} to {last} of {partition} that did not finish, and no"
                f" finished segment has offset {begins_at}"
            )
