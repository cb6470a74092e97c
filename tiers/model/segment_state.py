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


_SEGMENT_SUCCESSORS: dict[RemoteLogSegmentState | None, frozenset[RemoteLogSegmentState]] = {
    None: frozenset({RemoteLogSegmentState.COPY_SEGMENT_STARTED}),
    RemoteLogSegmentState.COPY_SEGMENT_STARTED: frozenset(
        {RemoteLogSegmentState.COPY_SEGMENT_FINISHED, RemoteLogSegmentState.DELETE_SEGMENT_STARTED}
    ),
    RemoteLogSegmentState.COPY_SEGMENT_FINISHED: frozenset({RemoteLogSegmentState.DELETE_SEGMENT_STARTED}),
    RemoteLogSegmentState.DELETE_SEGMENT_STARTED: frozenset({RemoteLogSegmentState.DELETE_SEGMENT_FINISHED}),
    RemoteLogSegmentState.DELETE_SEGMENT_FINISHED: frozenset(),
}


def is_valid_transition(source: RemoteLogSegmentState | None, target: RemoteLogSegmentState) -> bool:
    """Returns whether the owner may write `target` after `source`; None means that there is no record yet."""
    return source == target or target in _SEGMENT_SUCCESSORS[source]


def is_forward(source: RemoteLogSegmentState, target: RemoteLogSegmentState) -> bool:
    """Returns whether a replay may see `target` after `source`.

    Compaction may have removed the states between them (docs/design.md, "Metadata").
    """
    return target >= source


def is_valid_partition_transition(
    source: RemotePartitionDeleteState | None, target: RemotePartitionDeleteState
) -> bool:
    """Returns whether the owner may write `target` after `source`: marked, started, finished, without skips."""
    return source == target or target == (-1 if source is None else source) + 1
