"""`tidegate` with a planted bug that a drill must find: `python -m tests.drill.planted BUG serve --config FILE`.

The bugs exist only here, in this process. The product does not have them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from protocol.records.record_batch import iterate_batches
from proxy.cli import run
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.metadata_producer import GroupMember, TransactionalProducer
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.segment_builder import SegmentBuilder


def trim_before_visibility() -> None:
    """A finished segment counts as visible since ever, so the owner does not wait for the other proxies."""

    def seen_at_ms(self: RemoteLogMetadataStateWriter, segment_id: RemoteLogSegmentId) -> int | None:
        return -(1 << 40)

    RemoteLogMetadataStateWriter.seen_at_ms = seen_at_ms  # type: ignore[method-assign]  # a bug is planted


def commit_without_fencing() -> None:
    """A transaction does not name the member that writes it, so a member of an old generation may commit."""

    async def commit_offset(self: TransactionalProducer, member: GroupMember, offset: int, deadline_ms: int) -> None:
        return

    TransactionalProducer._commit_offset = commit_offset  # type: ignore[method-assign]  # a bug is planted


def dropped_chunk() -> None:
    """The first batches of every fifth answer of the broker are missing from the segment."""
    append, count = SegmentBuilder.append, 0

    def append_less(
        self: SegmentBuilder,
        records: bytes,
        aborted_transactions: Sequence[AbortedTransaction],
        named: Sequence[LeaderEpochEntry] | None = None,
    ) -> None:
        nonlocal count
        count += 1
        batches = list(iterate_batches(records))
        if count % 5 == 0 and len(batches) > 1:
            records = records[batches[len(batches) // 2].start :]
        append(self, records, aborted_transactions, named)

    SegmentBuilder.append = append_less  # type: ignore[method-assign]  # a bug is planted


BUGS: dict[str, Callable[[], None]] = {
    "trim-before-visibility": trim_before_visibility,
    "commit-without-fencing": commit_without_fencing,
    "dropped-chunk": dropped_chunk,
}


if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    sys.exit(run(sys.argv[2:]))
