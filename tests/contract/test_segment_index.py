"""The contract of `SegmentIndex`, over all implementations: what a look-up names, a reader finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import RecordBatch, iterate_batches
from tests.support.fakes.record_batches import build_batch, record
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import IndexesObject, decode_indexes_object
from tiers.segment.indexes.local_index_files import LocalIndexFiles
from tiers.segment.indexes.segment_index import AbortedTransactionRange, SegmentIndex
from tiers.segment.transactions import MARKER_NOT_COPIED

BASE_OFFSET = 1000
CHUNK_BYTES = 3000

Opener = Callable[[IndexesObject], SegmentIndex]
SHAPES = st.lists(
    st.tuples(
        st.integers(0, 3),  # offsets missing before the batch
        st.integers(1, 4),  # records
        st.integers(1, 2500),  # bytes of each value
        st.integers(-40, 60),  # milliseconds since the batch before
    ),
    min_size=1,
    max_size=40,
)


def by_local_files(decoded: IndexesObject) -> SegmentIndex:
    with TemporaryDirectory() as folder:
        files = LocalIndexFiles(Path(folder), decoded.metadata.start_offset)
        files.append(decoded)
        found = files.find(decoded.metadata)
    assert found is not None
    return found[0]


OPENERS: dict[str, Opener] = {
    "remote log index": IndexesObject.remote_log_index,
    "local index files": by_local_files,
}


@pytest.fixture(scope="module", params=OPENERS.values(), ids=list(OPENERS))
def open_index(request: pytest.FixtureRequest) -> Opener:
    opener: Opener = request.param
    return opener


class Segment:
    def __init__(self, folder: Path, shapes: list[tuple[int, int, int, int]], open_index: Opener) -> None:
        batches: list[bytes] = []
        offset, timestamp = BASE_OFFSET, 1_600_000_000_000
        for hole, count, value_bytes, step in shapes:
            offset += hole
            timestamp += step
            records = [record(offset + i, timestamp - i, value=bytes(value_bytes)) for i in range(count)]
            batches.append(build_batch(offset, records))
            offset += count
        aborted = [AbortedTransaction(7, BASE_OFFSET - 5), AbortedTransaction(8, BASE_OFFSET)]
        built = build_segment(folder / "log", batches, BASE_OFFSET, aborted, CHUNK_BYTES)
        metadata = metadata_of(built)
        self.log = built.log_segment.read_bytes()
        self.index = open_index(decode_indexes_object(built.log_segment_data(metadata).indexes, metadata))
        self.end_offset = built.end_offset
        self.batches = list(iterate_batches(self.log))

    def read_from(self, chunk_number: int) -> list[RecordBatch]:
        """The batches of that chunk and of those that follow."""
        start = self.index.chunks()[chunk_number].stored_position
        return [batch for batch in self.batches if batch.start >= start]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("segment")


@given(shapes=SHAPES)
@settings(max_examples=50)
def test_chunks_are_the_whole_segment_in_whole_batches(
    open_index: Opener, folders: Callable[[], Path], shapes: list[tuple[int, int, int, int]]
) -> None:
    segment = Segment(folders(), shapes, open_index)
    chunks = segment.index.chunks()
    borders = {batch.start for batch in segment.batches}
    position = 0
    for chunk in chunks:
        assert chunk.stored_position == position
        assert position in borders
        inside = list(iterate_batches(segment.log[position : position + chunk.stored_bytes]))
        assert chunk.log_bytes == chunk.stored_bytes == sum(batch.size_bytes for batch in inside)
        assert chunk.first_offset <= inside[0].last_offset
        assert inside[-1].last_offset <= chunk.last_offset
        assert chunk.max_timestamp_ms >= max(batch.max_timestamp for batch in inside)
        position += chunk.stored_bytes
    assert position == len(segment.log)
    assert chunks[-1].last_offset == segment.end_offset


@given(shapes=SHAPES)
@settings(max_examples=50)
def test_an_offset_is_found_in_the_chunk_named_or_the_next(
    open_index: Opener, folders: Callable[[], Path], shapes: list[tuple[int, int, int, int]]
) -> None:
    segment = Segment(folders(), shapes, open_index)
    chunks = segment.index.chunks()
    for offset in range(BASE_OFFSET, segment.end_offset + 1):
        wanted = next(batch for batch in segment.batches if batch.last_offset >= offset)
        number = segment.index.chunk_number_for_offset(offset)
        assert number is not None
        found = next(batch for batch in segment.read_from(number) if batch.last_offset >= offset)
        assert found == wanted
        last = chunks[min(number + 1, len(chunks) - 1)]
        assert found.end <= last.stored_position + last.stored_bytes
    assert segment.index.chunk_number_for_offset(segment.end_offset + 1) is None
    assert segment.index.chunk_number_for_offset(0) == 0


@given(shapes=SHAPES, data=st.data())
@settings(max_examples=50)
def test_no_chunk_that_holds_a_timestamp_is_passed_over(
    open_index: Opener, folders: Callable[[], Path], shapes: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    segment = Segment(folders(), shapes, open_index)
    chunks = segment.index.chunks()
    highest = max(batch.max_timestamp for batch in segment.batches)
    lowest = min(batch.max_timestamp for batch in segment.batches)
    timestamp = data.draw(st.integers(lowest - 1, highest + 1))
    from_chunk = data.draw(st.integers(0, len(chunks)))
    number = segment.index.chunk_number_for_timestamp(timestamp, from_chunk)
    skipped = chunks[from_chunk : len(chunks) if number is None else number]
    for chunk in skipped:
        end = chunk.stored_position + chunk.stored_bytes
        inside = [batch for batch in segment.batches if chunk.stored_position <= batch.start < end]
        assert all(batch.max_timestamp < timestamp for batch in inside)
    assert number is None or number >= from_chunk
    assert segment.index.chunk_number_for_timestamp(highest + 1) is None


def test_aborted_transactions_and_leader_epochs(open_index: Opener, tmp_path: Path) -> None:
    segment = Segment(tmp_path, [(0, 2, 100, 1)], open_index)
    open_ended = [
        AbortedTransactionRange(7, BASE_OFFSET - 5, MARKER_NOT_COPIED),
        AbortedTransactionRange(8, BASE_OFFSET, MARKER_NOT_COPIED),
    ]
    assert segment.index.aborted_transactions(BASE_OFFSET, BASE_OFFSET + 1) == open_ended
    assert segment.index.aborted_transactions(BASE_OFFSET - 5, BASE_OFFSET - 1) == open_ended[:1]
    assert segment.index.leader_epochs() == (LeaderEpochEntry(0, BASE_OFFSET),)
