"""The states of a remote log segment and of a remote partition's deletion (KIP-405, docs/semantics.md 11.2).

    COPY_SEGMENT_STARTED -> COPY_SEGMENT_FINISHED -> DELETE_SEGMENT_STARTED -> DELETE_SEGMENT_FINISHED
            \\_________________________________________^

    DELETE_PARTITION_MARKED -> DELETE_PARTITION_STARTED -> DELETE_PARTITION_FINISHED

Only segments in COPY_SEGMENT_FINISHED are readable. A retry may write a state again, which is idempotent.
"""

from __future__ import annotations

from enum import IntEnum


class RemoteLogSegmentState(IntEnum):
    COPY_SEGMENT_STARTED = 0
    COPY_SEGMENT_FINISHED = 1
    DELETE_SEGMENT_STARTED = 2
    DELETE_SEGMENT_FINISHED = 3


class RemotePartitionDeleteState(IntEnum):
    DELETE_PARTITION_MARKED = 0
    DELETE_PARTITION_STARTED = 1
    DELETE_PARTITION_FINISHED = 2


def is_valid_transition(source: RemoteLogSegmentState, target: RemoteLogSegmentState) -> bool:
    """Returns whether the owner may write `target` after `source`."""
    is_given_up = (source, target) == (
        RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        RemoteLogSegmentState.DELETE_SEGMENT_STARTED,
    )
    return is_given_up or target - source in (0, 1)


def is_valid_partition_transition(
    source: RemotePartitionDeleteState | None, target: RemotePartitionDeleteState
) -> bool:
    """Returns whether the owner may write `target` after `source`: marked, started, finished, without skips."""
    return source == target or target == (-1 if source is None else source) + 1
