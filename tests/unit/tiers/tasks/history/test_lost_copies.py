"""An unfinished copy whose records the broker has removed meanwhile: it may be the only copy, and is never deleted."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.workbench import PARTITION, ProcessEnded, Workbench
from tiers.errors import MetadataLostError, RemoteStorageError
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import indexes_key, log_key


@pytest.fixture
async def unfinished(bench: Workbench) -> Workbench:
    """The owner ended after it had written the objects of [0, 30). Another one begins, with a readable manifest."""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(4)])
    await bench.write_manifest()
    bench.end_after = "copy-verified"
    with pytest.raises(ProcessEnded):
        await bench.copy_all()
    bench.end_after = ""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(4, 8)])
    bench.restart()
    return bench


def keys(copy: RemoteLogSegmentMetadata) -> set[str]:
    return {log_key("cluster", copy), indexes_key("cluster", copy)}


async def test_while_the_broker_has_its_records_it_is_deleted(unfinished: Workbench) -> None:
    [copy] = unfinished.segments
    await unfinished.copy_all()
    assert not keys(copy) & {*await unfinished.objects()}
    assert unfinished.finished == [(0, 29), (30, 59)]


async def test_a_whole_one_stops_the_partition(unfinished: Workbench) -> None:
    [copy] = unfinished.segments
    unfinished.log.log_start_offset = 40
    await unfinished.write_manifest()
    with pytest.raises(MetadataLostError, match="but the store has it"):
        await unfinished.copy()
    assert keys(copy) <= {*await unfinished.objects()}
    assert unfinished.segments == [copy]


async def test_an_unmounted_store_shows_nothing_about_one(unfinished: Workbench) -> None:
    [copy] = unfinished.segments
    await unfinished.check_manifest()
    unfinished.log.log_start_offset = 40
    root = unfinished.folder / "remote"
    root.rename(unfinished.folder / "mounted")
    (root / ".tmp").mkdir(parents=True)
    with pytest.raises(RemoteStorageError, match="is it not mounted"):
        await unfinished.copy()
    assert unfinished.segments == [copy]


async def test_an_accepted_one_stays_in_the_store(unfinished: Workbench) -> None:
    [copy] = unfinished.segments
    unfinished.log.log_start_offset = 40
    await unfinished.accept()
    await unfinished.write_manifest()
    await unfinished.copy_all()
    assert keys(copy) <= {*await unfinished.objects()}
    assert unfinished.finished == [(40, 69)]


async def test_objects_of_an_unfinished_copy_of_removed_records_stay(unfinished: Workbench) -> None:
    [copy] = unfinished.segments
    unfinished.log.log_start_offset = 40
    await unfinished.store.delete_object(indexes_key("cluster", copy))
    await unfinished.copy_all()
    assert log_key("cluster", copy) in await unfinished.objects()
    assert unfinished.finished == [(40, 69)]


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
async def test_one_that_the_store_cut_stays_and_stops_nothing(unfinished: Workbench, suffix: str) -> None:
    """It was never read back whole, so it never ended, and nothing can restore it."""
    [copy] = unfinished.segments
    unfinished.log.log_start_offset = 40
    [path] = (unfinished.folder / "remote").rglob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    await unfinished.write_manifest()
    await unfinished.copy_all()
    assert keys(copy) <= {*await unfinished.objects()}
    assert unfinished.finished == [(40, 69)]


async def test_one_that_a_later_release_wrote_counts_as_whole(unfinished: Workbench) -> None:
    [copy] = unfinished.segments
    unfinished.log.log_start_offset = 40
    [path] = (unfinished.folder / "remote").rglob("*.indexes")
    raw = bytearray(path.read_bytes())
    raw[5] += 1  # the version
    path.write_bytes(raw)
    await unfinished.write_manifest()
    with pytest.raises(MetadataLostError, match="but the store has it"):
        await unfinished.copy()
    assert unfinished.segments == [copy]


@pytest.fixture
async def spooled(bench: Workbench) -> tuple[Workbench, list[RemoteLogSegmentMetadata]]:
    """The owner has read [30, 50), which the broker has removed since. Two attempts at it were written without an end.

    The owner copies an open segment at once when the broker has removed its records."""
    batches = [batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(5)]
    bench.log.append(*batches)
    await bench.write_manifest()
    await bench.copy_all()
    assert bench.finished == [(0, 29)]
    copies = []
    for number in range(2):
        built = build_segment(bench.folder / f"attempt-{number}", batches[3:], base_offset=30)
        copy = metadata_of(built, PARTITION)
        bench.wall_ms += 1
        await bench.metadata.add_remote_log_segment_metadata(copy)
        await bench.store.copy_log_segment_data(copy, built.log_segment_data(copy))
        copies.append(copy)
    bench.log.log_start_offset = 50
    return bench, copies


async def test_one_whose_records_the_owner_has_goes_after_another_copy(
    spooled: tuple[Workbench, list[RemoteLogSegmentMetadata]],
) -> None:
    bench, copies = spooled
    await bench.copy()
    assert bench.finished == [(0, 29), (30, 49)]
    assert [keys(copy) <= {*await bench.objects()} for copy in copies] == [True, False]
    await bench.copy()
    assert not keys(copies[0]) & {*await bench.objects()}


async def test_one_outlives_an_owner_that_ends_before_another_copy(
    spooled: tuple[Workbench, list[RemoteLogSegmentMetadata]],
) -> None:
    """The spool is gone with the owner, and its own attempt at the records has no object."""
    bench, copies = spooled
    bench.end_after = "copy-started-written"
    with pytest.raises(ProcessEnded):
        await bench.copy()
    bench.end_after = ""
    bench.restart()
    await bench.write_manifest()
    with pytest.raises(MetadataLostError, match="but the store has it"):
        await bench.copy()
    assert keys(copies[0]) <= {*await bench.objects()}


@pytest.fixture
async def forgotten(bench: Workbench) -> Workbench:
    """[0, 30) and [30, 60) are copied. The metadata lost the second one, and the manifest is from before it.

    The broker's own retention has removed all records below 70 since."""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(4)])
    await bench.copy_all()
    await bench.write_manifest()
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(4, 11)])
    await bench.copy()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    for segment in bench.segments[1:]:
        del bench.metadata.segments[segment.segment_id]
    bench.log.log_start_offset = 70
    bench.restart()
    await bench.write_manifest()
    return bench


async def test_a_copy_that_the_metadata_lost_is_no_gap(forgotten: Workbench) -> None:
    with pytest.raises(MetadataLostError, match="but the store has them"):
        await forgotten.copy()
    assert forgotten.metadata.gaps(PARTITION) == []
    assert len(await forgotten.objects()) == 7


async def test_an_answer_that_is_damaged_on_its_way_makes_no_gap(
    forgotten: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, asked = forgotten.store.fetch_indexes, set[UUID]()

    async def damages_the_first_answer(segment: RemoteLogSegmentMetadata) -> bytes:
        found, is_first = await fetch(segment), segment.segment_id.id not in asked
        asked.add(segment.segment_id.id)
        return found[:-1] if is_first else found

    monkeypatch.setattr(forgotten.store, "fetch_indexes", damages_the_first_answer)
    with pytest.raises(MetadataLostError, match="but the store has them"):
        await forgotten.copy()


async def test_a_gap_waits_again_after_a_witness_contradicted_it(
    forgotten: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that are damaged for a moment, hours apart, are no two witnesses of a damaged copy."""

    async def damages(segment: RemoteLogSegmentMetadata) -> bytes:
        return b"an error page"

    async def copies_while_answers_are_damaged() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(forgotten.store, "fetch_indexes", damages)
            await forgotten.copy()

    await copies_while_answers_are_damaged()
    forgotten.now_ms += forgotten.services.settings.gap_alarm_ms
    with pytest.raises(MetadataLostError, match="but the store has them"):
        await forgotten.copy()
    await copies_while_answers_are_damaged()
    assert forgotten.metadata.gaps(PARTITION) == []


async def test_a_listing_of_objects_that_are_gone_is_no_witness(forgotten: Workbench) -> None:
    for key in await forgotten.objects():
        if key.endswith(".indexes") and "00000000000000000000-" not in key:
            await forgotten.store.delete_object(key)
    await forgotten.copy()
    forgotten.now_ms += forgotten.services.settings.gap_alarm_ms
    await forgotten.copy()
    assert forgotten.metadata.gaps(PARTITION) == [LogGap(30, 70)]
