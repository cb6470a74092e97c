"""A random log with transactions of a few producers, and copiers of it that end their segments wherever they like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from tests.support.fakes.record_batches import build_batch, control_batch, record
from tests.support.fakes.segments import metadata_of
from tiers.model.log_source import AbortedTransaction
from tiers.segment.indexes.indexes_object import IndexesObject, decode_indexes_object, encode_indexes_object
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder

ACTS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(("data", "data", "plain", "commit", "abort", "elected"))),
    min_size=4,
    max_size=24,
)


@dataclass(frozen=True)
class TransactionalLog:
    """`aborted`: `(transaction, the offset of its marker)`; what is open at the end aborts after it."""

    batches: tuple[tuple[int, bytes], ...]
    aborted: tuple[tuple[AbortedTransaction, int], ...]

    def reports(self, first: int, last: int) -> list[AbortedTransaction]:
        """What the leader says with a fetch of these offsets."""
        return [one for one, marker in self.aborted if one.first_offset <= last and marker >= first]


def log_of(acts: Sequence[tuple[int, str]]) -> TransactionalLog:
    """Every batch of records has two."""
    batches: list[tuple[int, bytes]] = []
    aborted: list[tuple[AbortedTransaction, int]] = []
    begun: dict[int, int] = {}
    offset = epoch = 0
    for producer, act in acts:
        if act == "elected":
            epoch += 1
        elif act in ("data", "plain"):
            if act == "data":
                begun.setdefault(producer, offset)
            records = [record(offset, 1_600_000_000_000 + offset), record(offset + 1, 1_600_000_000_000 + offset)]
            batches.append(
                (
                    offset,
                    build_batch(
                        offset,
                        records,
                        leader_epoch=epoch,
                        producer_id=producer if act == "data" else -1,
                        producer_epoch=0,
                        transactional=act == "data",
                    ),
                )
            )
            offset += 2
        elif producer in begun:
            batches.append(
                (offset, control_batch(offset, commit=act == "commit", producer_id=producer, leader_epoch=epoch))
            )
            if act == "abort":
                aborted.append((AbortedTransaction(producer, begun[producer]), offset))
            del begun[producer]
            offset += 1
    aborted += [(AbortedTransaction(producer, first), offset + producer) for producer, first in begun.items()]
    return TransactionalLog(tuple(batches), tuple(aborted))


def copied(
    folder: Path, log: TransactionalLog, ends: Sequence[int], base: int = 0, chunk_bytes: int = 200
) -> list[BuiltSegment]:
    """Segments that end after the batches of these numbers; the first one begins with batch `base`."""
    segments: list[BuiltSegment] = []
    first = base
    for end in ends:
        batches = log.batches[first:end]
        if not batches:
            continue
        start = batches[0][0]
        path = folder / f"segment-{len(list(folder.iterdir()))}"
        if segments:
            before = segments[-1]
            builder = SegmentBuilder(
                path,
                start,
                lambda: 0,
                before.leader_epochs,
                before.open_transactions,
                before.producers,
                chunk_bytes=chunk_bytes,
            )
        else:
            builder = SegmentBuilder(path, start, lambda: 0, chunk_bytes=chunk_bytes)
        for offset, data in batches:
            builder.append(data, log.reports(offset, offset + 1))
        segments.append(builder.finish())
        first = end
    return segments


def indexes_of(built: BuiltSegment) -> IndexesObject:
    metadata = metadata_of(built)
    return decode_indexes_object(encode_indexes_object(metadata, built.indexes), metadata)
