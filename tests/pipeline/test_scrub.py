"""Scrub finds each planted fault of a tier, and nothing else. A segment that is replaced meanwhile is no fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.maintenance import segment_scrub
from pipeline.maintenance.scrub import ScrubOptions, overlaps, packed, scrub_tier
from pipeline.maintenance.scrub_report import FindingKind, ScrubLevel, ScrubReport
from protocol.records.record_batch import crc32c
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of, build_batch, record
from tests.support.fakes.segments import PARTITION
from tests.support.fakes.stored_segments import stored
from tests.support.pipeline.scrub_bench import ScrubBench, scrub_bench
from tiers.errors import RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import Section, decode_indexes_object, decode_sections, encode_sections
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.object_key import SegmentObjectKey, facts_key, indexes_key, log_key, segment_of_key
from tiers.upkeep.runner import JobError
from tiers.verify.segment_verification import verify_segment

META, BATCH, DEEP = ScrubLevel
Found = tuple[FindingKind, str | None, int | None, int | None]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ScrubBench]:
    async with scrub_bench(tmp_path) as made:
        yield made


async def scrubbed(bench: ScrubBench, level: ScrubLevel = BATCH, **options: object) -> ScrubReport:
    made = ScrubOptions(level, **options)  # type: ignore[arg-type]  # the fields are named by the tests
    return await scrub_tier(bench.tier(), bench.config, bench.runner, made)


def found(report: ScrubReport) -> list[Found]:
    return [(each.kind, each.segment, each.first_offset, each.last_offset) for each in report.findings]


def name(segment: RemoteLogSegmentMetadata) -> str:
    return str(segment.segment_id.id)


async def three(bench: ScrubBench) -> list[RemoteLogSegmentMetadata]:
    """Two batches of ten in each, every batch a chunk; the last one is encrypted."""
    segments = []
    for start in (0, 20, 40):
        if start == 40:
            bench.seal_from_now_on()
        segments.append(await bench.finished(start, [batch_of(start, 10), batch_of(start + 10, 10)], chunk_bytes=1))
    await bench.put_facts()
    return segments


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


@pytest.mark.parametrize("level", [META, DEEP])
async def test_a_tier_in_order_has_no_findings(bench: ScrubBench, level: ScrubLevel) -> None:
    segments = await three(bench)
    report = await scrubbed(bench, level)
    assert report.findings == []
    stored = sum(path.stat().st_size for path in bench.files())
    assert (report.partitions, report.objects, report.stored_bytes) == (1, 7, stored)
    log_bytes = sum(each.segment_size_bytes for each in segments)
    looked_at = (report.segments, report.log_bytes, report.batches, report.records)
    assert looked_at == ((0, 0, 0, 0) if level is META else (3, log_bytes, 6, 60))


@pytest.mark.parametrize("number", [1, 2])
async def test_a_flipped_byte_is_found_in_its_chunk(bench: ScrubBench, number: int) -> None:
    damaged = (await three(bench))[number]
    chunk = decode_indexes_object(bench.file(damaged, ".indexes").read_bytes()).chunks()[1]
    bench.change(damaged, ".log", flipped(chunk.stored_position + 70))
    report = await scrubbed(bench)
    assert found(report) == [(FindingKind.DAMAGED, name(damaged), chunk.first_offset, chunk.last_offset)]
    assert report.findings[0].position == chunk.stored_position
    assert found(await scrubbed(bench, META)) == []


@pytest.mark.parametrize(("level", "suffix"), [(META, ".log"), (META, ".indexes"), (BATCH, ".log")])
async def test_a_missing_object_is_found_once(bench: ScrubBench, level: ScrubLevel, suffix: str) -> None:
    _, lost, _ = await three(bench)
    bench.file(lost, suffix).unlink()
    report = await scrubbed(bench, level)
    assert found(report) == [(FindingKind.MISSING, name(lost), 20, 39)]
    assert report.findings[0].what == f"the {suffix} object is missing"


async def test_a_log_that_was_cut_short_is_found_without_reading_it(bench: ScrubBench) -> None:
    cut, _, _ = await three(bench)
    bench.change(cut, ".log", lambda data: data[:-1])
    [finding] = (await scrubbed(bench, META)).findings
    assert (finding.kind, finding.segment) == (FindingKind.DAMAGED, name(cut))
    assert finding.what == f"the .log object has {cut.segment_size_bytes - 1} of {cut.segment_size_bytes} bytes"


async def test_a_stale_index_is_found(bench: ScrubBench) -> None:
    stale, _, _ = await three(bench)

    def without_times(data: bytes) -> bytes:
        sections = {number: bytes(content) for number, content in decode_sections(data).items()}
        return encode_sections(sections | {Section.TIME_INDEX: b""})

    bench.change(stale, ".indexes", without_times)
    report = await scrubbed(bench)
    assert found(report) == [(FindingKind.STALE_INDEX, name(stale), 0, 19)]
    assert found(await scrubbed(bench, META)) == []


async def test_gaps_and_overlaps_between_segments_are_found(bench: ScrubBench) -> None:
    await bench.finished(0, [batch_of(0, 10)])
    await bench.finished(15, [batch_of(15, 10)])
    other = await bench.finished(20, [batch_of(20, 10)])
    for level in (META, BATCH):
        assert found(await scrubbed(bench, level)) == [
            (FindingKind.GAP, None, 10, 14),
            (FindingKind.OVERLAP, name(other), 20, 24),
        ]
    await bench.rlmm.put_log_start(PARTITION, user_log_start(25))
    assert found(await scrubbed(bench)) == []


async def test_offsets_missing_inside_a_segment_are_told_and_no_finding(bench: ScrubBench) -> None:
    segment = await bench.finished(0, [batch_of(0, 10), batch_of(13, 7)])
    report = await scrubbed(bench)
    assert report.findings == []
    assert [(each.segment, each.missing_offsets) for each in report.inner_gaps] == [(name(segment), 3)]


async def test_records_that_do_not_decode_are_found_by_a_deep_scrub_alone(bench: ScrubBench) -> None:
    torn = bytearray(batch_of(10, 10))
    torn[61] ^= 0x40  # the length of the first record
    batches = [batch_of(0, 10), with_crc(bytes(torn)), batch_of(20, 10, codec=4)]
    twice = build_batch(30, [record(30), record(32), record(31)], last_offset=32)
    segment = await bench.finished(0, [*batches, twice, batch_of(33, 5)])
    assert found(await scrubbed(bench)) == []
    report = await scrubbed(bench, DEEP)
    assert found(report) == [
        (FindingKind.DAMAGED, name(segment), 10, 19),
        (FindingKind.DAMAGED, name(segment), 30, 32),
    ]
    positions = [len(batches[0]), sum(map(len, batches))]
    assert [each.position for each in report.findings] == positions
    assert report.records == 10 + 10 + 3 + 5


def with_crc(batch: bytes) -> bytes:
    return batch[:17] + crc32c(batch, 21, len(batch)).to_bytes(4, "big") + batch[21:]


async def test_objects_without_a_record_are_found_when_they_are_old(bench: ScrubBench) -> None:
    await three(bench)
    orphan = await bench.stored(0)
    report = await scrubbed(bench, META)
    assert (found(report), report.young_orphans) == ([], 2)
    report = await scrubbed(bench, META, grace_ms=0)
    assert found(report) == [(FindingKind.ORPHAN, name(orphan), 0, 9)] * 2
    assert [each.object for each in report.findings] == [of("cluster", orphan) for of in (indexes_key, log_key)]
    assert (report.deletable_segments, report.deleted_segments, len(bench.files())) == (1, 0, 9)
    report = await scrubbed(bench, META, grace_ms=0, delete_orphans=True)
    assert (found(report), report.deleted_segments, len(bench.files())) == ([], 1, 7)


async def test_segments_that_the_metadata_lost_are_found_and_never_deleted(bench: ScrubBench) -> None:
    bench.topics = {PARTITION.topic_id}
    segments = await three(bench)
    bench.forget(segments[2])
    report = await scrubbed(bench, META, grace_ms=0, delete_orphans=True)
    assert {(each.kind, each.segment) for each in report.findings} == {(FindingKind.ORPHAN, name(segments[2]))}
    assert (report.deleted_segments, len(bench.files())) == (0, 7)


async def test_strange_objects_are_found_and_those_of_other_clusters_counted(bench: ScrubBench) -> None:
    await three(bench)
    await bench.storage.put_object("notes.txt", b"mine")
    await bench.storage.put_object(facts_key("another", PARTITION, 0, 5, UUID(int=1)), b"{}")
    report = await scrubbed(bench, META)
    assert [(each.kind, each.object) for each in report.findings] == [(FindingKind.ORPHAN, "notes.txt")]
    assert report.other_clusters == 1


def in_the_middle(bench: ScrubBench, work: Callable[[], object], what: str = "reading back") -> None:
    """Done when that run of tasks begins: after the metadata was read, before the objects are."""

    def before(running: str) -> None:
        if running == what:
            work()

    bench.runner.before = before


async def test_a_segment_that_is_deleted_meanwhile_is_no_finding(bench: ScrubBench) -> None:
    gone, _, _ = await three(bench)

    def delete() -> None:
        asyncio.run(bench.move(gone, RemoteLogSegmentState.DELETE_SEGMENT_STARTED))
        for suffix in (".log", ".indexes"):
            bench.file(gone, suffix).unlink()
        bench.forget(gone)

    in_the_middle(bench, delete)
    report = await scrubbed(bench)
    assert (found(report), report.outdated) == ([], 1)


async def test_a_segment_that_is_merged_meanwhile_is_no_finding(bench: ScrubBench) -> None:
    small = [await bench.finished(start, [batch_of(start, 10)]) for start in (0, 10)]
    in_the_middle(bench, lambda: asyncio.run(bench.finished(0, [batch_of(0, 10), batch_of(10, 10)])), "listing")
    report = await scrubbed(bench)
    assert found(report) == []  # one that has just been merged overlaps those that it was made of
    bench.runner.before = lambda what: None
    assert {kind for kind, *_ in found(await scrubbed(bench, META))} == {FindingKind.OVERLAP}

    def retire() -> None:
        for each in small:
            asyncio.run(bench.move(each, RemoteLogSegmentState.DELETE_SEGMENT_STARTED))
            bench.file(each, ".log").unlink()

    in_the_middle(bench, retire)
    report = await scrubbed(bench)
    assert (found(report), report.outdated) == ([], 2)


async def test_a_copy_that_begins_meanwhile_leaves_no_orphan(bench: ScrubBench) -> None:
    await three(bench)

    def begin() -> None:
        copied = asyncio.run(bench.stored(60))
        asyncio.run(bench.rlmm.add_remote_log_segment_metadata(copied))

    in_the_middle(bench, begin, "listing")
    report = await scrubbed(bench, META, grace_ms=0)
    assert (found(report), report.young_orphans) == ([], 0)


async def test_an_object_that_only_the_listing_lacks_is_no_finding(
    bench: ScrubBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, _, _ = await three(bench)
    path, hidden = bench.file(late, ".log"), bench.folder / "hidden"
    path.rename(hidden)

    async def appears(tier: object) -> None:
        hidden.rename(path)

    monkeypatch.setattr(type(bench.tier()), "refresh", appears)
    assert found(await scrubbed(bench, META)) == []


async def test_it_goes_on_where_it_ended_at_the_same_level_or_a_lesser_one(bench: ScrubBench) -> None:
    damaged, _, _ = await three(bench)
    whole = bench.file(damaged, ".log").read_bytes()
    bench.change(damaged, ".log", flipped(80))
    notes = bench.folder / "notes"
    assert len((await scrubbed(bench, resume=notes)).findings) == 1
    bench.file(damaged, ".log").write_bytes(whole)
    report = await scrubbed(bench, resume=notes)
    assert (report.segments, report.already_scrubbed, report.findings) == (1, 2, [])
    report = await scrubbed(bench, DEEP, resume=notes)
    assert (report.segments, report.already_scrubbed) == (3, 0)
    report = await scrubbed(bench, resume=notes)
    assert (report.segments, report.already_scrubbed) == (0, 3)


async def test_the_objects_read_before_an_interrupt_are_noted(
    bench: ScrubBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.maintenance.scrub._MAX_TASK_BYTES", 1)  # so that each segment is a task
    segments = [await bench.finished(start, [batch_of(start, 10)]) for start in range(0, 100, 10)]
    bench.runner.parallelism = 1

    def interrupt() -> None:
        raise JobError("no executor is left")

    in_the_middle(bench, interrupt, "reading back, part 2 of 3")
    notes = bench.folder / "notes"
    with pytest.raises(JobError, match="no executor is left"):
        await scrubbed(bench, resume=notes)
    assert [name(each) in notes.read_text() for each in segments] == [True] * 4 + [False] * 6
    bench.runner.before = lambda what: None
    assert (await scrubbed(bench, resume=notes)).already_scrubbed == 4


async def test_an_unreadable_segment_is_found_and_the_others_are_read(
    bench: ScrubBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, unread, _ = await three(bench)
    fetch = LocalRemoteStorageManager.fetch_log_segment

    async def fails(
        store: LocalRemoteStorageManager, segment: RemoteLogSegmentMetadata, start: int, end: int
    ) -> memoryview:
        if segment.segment_id == unread.segment_id:
            raise RetriableRemoteStorageError("503")
        return await fetch(store, segment, start, end)

    monkeypatch.setattr(LocalRemoteStorageManager, "fetch_log_segment", fails)
    notes = bench.folder / "notes"
    report = await scrubbed(bench, resume=notes)
    assert found(report) == [(FindingKind.UNREAD, name(unread), 20, 39)]
    assert "503" in report.findings[0].what
    assert name(unread) not in notes.read_text()


async def test_damage_before_a_failed_read_is_reported(bench: ScrubBench, monkeypatch: pytest.MonkeyPatch) -> None:
    unread, *_ = await three(bench)
    bench.change(unread, ".log", flipped(70))
    fetch = LocalRemoteStorageManager.fetch_log_segment

    async def fails(
        store: LocalRemoteStorageManager, segment: RemoteLogSegmentMetadata, start: int, end: int
    ) -> memoryview:
        if segment.segment_id == unread.segment_id and start > 0:
            raise RetriableRemoteStorageError("503")
        return await fetch(store, segment, start, end)

    monkeypatch.setattr(LocalRemoteStorageManager, "fetch_log_segment", fails)
    monkeypatch.setattr(segment_scrub, "verify_segment", partial(verify_segment, run_bytes=1, pause_ms=0))
    report = await scrubbed(bench)
    assert found(report) == [(FindingKind.DAMAGED, name(unread), 0, 9), (FindingKind.UNREAD, name(unread), 0, 19)]


def sized(size_bytes: int) -> RemoteLogSegmentMetadata:
    key = SegmentObjectKey("c", PARTITION.topic_id, 0, 0, 9, uuid4(), ".log")
    return replace(segment_of_key(key, None), segment_size_bytes=size_bytes)


def test_segments_are_packed_to_a_second_of_work_unless_cores_would_idle() -> None:
    mib = 1 << 20
    many = [sized(100 * mib) for _ in range(100)]
    tasks = list(packed(many, 512 * mib, 2))
    assert [each for task in tasks for each in task] == many
    assert {len(task) for task in tasks[:-1]} == {12}
    assert [len(task) for task in packed(many[:8], 512 * mib, 2)] == [4, 4]
    assert [len(task) for task in packed(many[:8], 512 * mib, 16)] == [1] * 8
    assert list(packed([], mib, 2)) == []


def segment(start: int, end: int, cut_at: int | None = None) -> RemoteLogSegmentMetadata:
    key = SegmentObjectKey("c", PARTITION.topic_id, PARTITION.partition, start, end, uuid4(), ".log")
    return replace(segment_of_key(key, None), cut_at=cut_at)


SEGMENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.none() | st.integers(0, 50)), max_size=8)


@given(made=SEGMENTS, log_start=st.integers(0, 30))
def test_they_are_what_more_than_one_segment_holds(made: list[tuple[int, int, int | None]], log_start: int) -> None:
    segments = [
        segment(start, start + length, None if valid_end is None or valid_end >= start + length else valid_end)
        for start, length, valid_end in made
    ]
    held = [offset for each in segments for offset in range(each.start_offset, each.valid_end_offset + 1)]
    several = {offset for offset in held if offset >= log_start and held.count(offset) > 1}
    in_order = map(stored, sorted(segments, key=lambda each: each.start_offset))
    found = list(overlaps(in_order, log_start))
    common = [
        range(each.first_offset, min(each.one.valid_end_offset, each.other.valid_end_offset) + 1) for each in found
    ]
    assert {offset for each in common for offset in each} == several
    assert all(one.one.segment_id != one.other.segment_id for one in found)
