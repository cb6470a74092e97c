"""Random logs with transactions of a few producers, and copiers that end their segments after any batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from tests.support.fakes.segments import metadata_of
from tests.support.written_log import WrittenLog
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import IndexesObject, decode_indexes_object, encode_indexes_object
from tiers.segment.segment_builder import BuiltSegment, Carried, SegmentBuilder

ACTS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(("data", "data", "plain", "commit", "abort", "elected"))),
    min_size=4,
    max_size=24,
)


def log_of(acts: Sequence[tuple[int, str]]) -> WrittenLog:
    """Returns a log with two records in every batch. The log leaves out the end of a transaction that has not begun."""
    log = WrittenLog()
    for producer, act in acts:
        timestamp_ms = 1_600_000_000_000 + log.end_offset
        if act == "elected":
            log.leader_epoch += 1
        elif act in ("data", "plain"):
            log.append(2, timestamp_ms, producer if act == "data" else -1)
        elif producer in log.open_transactions():
            log.end_transaction(producer, timestamp_ms, commit=act == "commit")
    return log


COMPACTED_ACTS = [
    *[(1, "plain"), (1, "elected"), (1, "plain"), (1, "elected"), (1, "plain"), (1, "plain"), (1, "plain")],
    *[(1, "elected"), (1, "plain"), (1, "plain"), (1, "plain"), (1, "plain")],
]
"""A log in four epochs that begin at offsets 0, 2, 4 and 10."""
COMPACTED_EPOCHS = tuple(LeaderEpochEntry(*each) for each in ((0, 0), (1, 2), (2, 4), (3, 10)))


def compacted_log() -> WrittenLog:
    """Returns the log of `COMPACTED_ACTS` after a compaction, with batches at 0, 6, 8, 12, 14 and 16.

    Epoch 1 has no record left, and epochs 2 and 3 begin in holes."""
    log = log_of(COMPACTED_ACTS)
    log.batches = [batch for batch in log.batches if batch.base_offset not in (2, 4, 10)]
    return log


def copied(
    folder: Path,
    log: WrittenLog,
    ends: Sequence[int],
    base: int = 0,
    chunk_bytes: int = 200,
    named: Sequence[LeaderEpochEntry] | None = None,
) -> list[BuiltSegment]:
    """Segments that end after the batches of these numbers; the first one begins with batch `base`.

    Each other one begins after the end of the one before it. `named` has the epochs that begin in holes."""
    segments: list[BuiltSegment] = []
    first = base
    for end in ends:
        batches = log.batches[first:end]
        if not batches:
            continue
        start = segments[-1].end_offset + 1 if segments else batches[0].base_offset
        path = folder / f"segment-{len(list(folder.iterdir()))}"
        carried = Carried.behind(segments[-1].indexes) if segments else Carried()
        builder = SegmentBuilder(path, start, carried, chunk_bytes)
        for batch in batches:
            builder.append(batch.data, log.reports(batch.base_offset, batch.base_offset + 1), named)
        segments.append(builder.finish())
        first = end
    return segments


def indexes_of(built: BuiltSegment) -> IndexesObject:
    metadata = metadata_of(built)
    return decode_indexes_object(encode_indexes_object(metadata, built.indexes), metadata)
