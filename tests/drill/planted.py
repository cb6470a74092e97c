"""`tidegate` with a planted bug that a drill must find: `python -m tests.drill.planted serve --config FILE`.

The bug exists only here, in this process. The product does not have it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from protocol.records.record_batch import iterate_batches
from proxy.cli import run
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.segment_builder import SegmentBuilder


def drop_batches() -> None:
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


if __name__ == "__main__":
    drop_batches()
    sys.exit(run(sys.argv[1:]))
