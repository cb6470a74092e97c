"""Every offset stays readable during a merge, wherever the merge ends. The merged records are the original ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import parse_pipeline_config
from pipeline.maintenance.merge_plan import MergeLimits, plan_merges
from tests.support.fakes.log_starts import user_log_start
from tests.support.pipeline.job_bench import FINISHED
from tests.support.pipeline.merge_bench import DATA, LIMITS, bench_of, log_bytes, merged
from tests.support.tiers.transactional_log import ACTS, COMPACTED_EPOCHS, compacted_log, copied, log_of
from tests.support.tiers.workbench import POLICY
from tests.support.written_log import WrittenLog
from tiers.model.segment_metadata import (
    LeaderEpochEntry,
    RemoteLogSegmentMetadata,
)
from tiers.segment.indexes.indexes_object import decode_indexes_object


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


class Ended(BaseException):
    """The driver."""


@settings(max_examples=12, deadline=None)
@given(ACTS, st.data())
def test_every_offset_stays_readable_wherever_the_driver_ends(
    root: Path, acts: list[tuple[int, str]], data: st.DataObject
) -> None:
    log = log_of(acts)
    count = len(log.batches)
    ends = sorted({*data.draw(st.sets(st.integers(1, max(count, 1)))), count})
    limits = MergeLimits(
        below_bytes=data.draw(st.sampled_from((300, 10_000))), target_bytes=data.draw(st.integers(200, 2000))
    )
    ends_at = data.draw(st.none() | st.integers(1, 12))
    whole = log.bytes_of(0, log.end_offset)

    async def run() -> None:
        nonlocal ends_at
        async with bench_of(root, log, ends) as bench:
            end = bench.state.remote_end_offset(bench.partition)
            records = 0

            def check() -> None:
                nonlocal records
                records += 1
                bench.metadata.follow()
                for offset in range((end or 0) + 1 if count else 0):
                    segment = bench.state.remote_log_segment_metadata(bench.partition, offset)
                    assert segment is not None, f"after {records} records nobody answers for {offset}"
                    assert len(bench.files(segment)) == 2, f"after {records} records {offset} is in no object"
                if records == ends_at:
                    raise Ended

            bench.log.on_record = check
            with suppress(Ended, BaseExceptionGroup):
                await merged(bench, limits)
            ends_at = None
            await bench.owners_round(POLICY)
            await bench.owners_round(POLICY)
            check()
            assert all(each.state is FINISHED for each in bench.segments)
            assert [end + 1 for _, end in bench.finished[:-1]] == [start for start, _ in bench.finished[1:]]
            assert len(list(bench.partition_folder.glob("*.log"))) == len(bench.segments)
            assert not count or await log_bytes(bench) == whole
            await merged(bench, limits)
            await bench.owners_round(POLICY)
            assert plan_merges(bench.state, bench.partition, limits) == []
            assert not count or await log_bytes(bench) == whole

    asyncio.run(run())


@pytest.fixture
def log() -> WrittenLog:
    return log_of(DATA * 3)


async def test_a_merged_segment_has_the_metadata_that_a_copier_gives(
    root: Path, log: WrittenLog, tmp_path: Path
) -> None:
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        done = await merged(bench)
        [one] = done.merged
        (tmp_path / "copied").mkdir()
        [whole, _] = copied(tmp_path / "copied", log, [9, len(log.batches)])
        found = decode_indexes_object(await bench.storage.fetch_indexes(one), one)
        assert replace(found.indexes, remote_log_index=b"", facts=b"") == replace(whole.indexes, remote_log_index=b"")
        assert (done.failed, len(done.replaced)) == ([], 3)
        await bench.owners_round(POLICY)
        assert bench.finished[0] == (0, whole.end_offset)
        assert [bench.files(each) for each in done.replaced] == [[]] * 3


async def test_the_owner_looks_once_for_a_merged_segment(
    root: Path, log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        await merged(bench)
        looked: list[RemoteLogSegmentMetadata] = []
        fetch = bench.storage.fetch_indexes

        async def fetched(segment: RemoteLogSegmentMetadata) -> bytes:
            looked.append(segment)
            return await fetch(segment)

        monkeypatch.setattr(bench.storage, "fetch_indexes", fetched)
        await bench.owners_round(POLICY)
        assert (len(looked), len(bench.finished)) == (1, 2)


async def test_encrypted_segments_are_not_merged_without_a_key(root: Path, log: WrittenLog, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    keys = f'[encryption]\nkeys.old = "{key}"\n'
    async with bench_of(root, log, [3, 6, 9], f'{keys}current = "old"\n') as bench:
        encrypting, bench.config = bench.config, parse_pipeline_config(bench.toml(keys))
        [(_, error)] = (await merged(bench)).failed
        assert error == "the segments are encrypted, and there is no key to encrypt the merged one with"
        bench.config = encrypting
        [one] = (await merged(bench)).merged
        found = decode_indexes_object(await bench.storage.fetch_indexes(one), one)
        assert found.indexes.encryption is not None
        assert await log_bytes(bench) == b"".join(batch.data for batch in log.batches[:9])


async def test_lone_large_newest_and_doubled_segments_are_left_alone(root: Path, log: WrittenLog) -> None:
    async with bench_of(root, log, [2, 4, 6, 8]) as bench:
        places = [(each.start_offset, each.end_offset) for each in bench.segments]

        def planned(limits: MergeLimits = LIMITS) -> list[list[tuple[int, int]]]:
            groups = plan_merges(bench.state, bench.partition, limits)
            return [[(each.start_offset, each.end_offset) for each in group.parts] for group in groups]

        assert planned() == [places[:3]]
        sizes = [each.segment_size_bytes for each in bench.segments]
        assert planned(MergeLimits(10_000, sizes[0] + sizes[1])) == [places[:2]]
        assert planned(MergeLimits(1, 10_000)) == []
        await bench.metadata.put_log_start(bench.partition, user_log_start(places[1][0]))
        assert planned() == [places[1:3]]
        [twice] = copied(bench.folder / "copied", log, [4], 2)
        await bench.store(twice)
        assert planned() == []


async def test_nothing_is_merged_while_a_cut_is_not_proved(root: Path, log: WrittenLog) -> None:
    """Nor are segments that are cut."""
    async with bench_of(root, log, [2, 4, 6, 8]) as bench:
        void_from = bench.segments[3].start_offset
        await bench.metadata.put_cut(bench.partition, 2, void_from, is_proved=False)
        assert plan_merges(bench.state, bench.partition, LIMITS) == []
        await bench.metadata.put_cut(bench.partition, 2, void_from)
        [group] = plan_merges(bench.state, bench.partition, LIMITS)
        assert len(group.parts) >= 2
        await bench.metadata.put_cut(bench.partition, 2, bench.segments[1].end_offset)
        assert plan_merges(bench.state, bench.partition, LIMITS) == []


@pytest.mark.parametrize("named", [COMPACTED_EPOCHS, None], ids=["the leader named", "no leader named"])
async def test_a_merged_segment_has_the_epochs_that_begin_in_holes(
    root: Path, tmp_path: Path, named: tuple[LeaderEpochEntry, ...] | None
) -> None:
    log = compacted_log()
    async with bench_of(root, log, [1, 3, 5, 6], named=named) as bench:
        [one] = (await merged(bench)).merged
        (tmp_path / "copied").mkdir()
        [whole, _] = copied(tmp_path / "copied", log, [5, 6], named=named)
        found = decode_indexes_object(await bench.storage.fetch_indexes(one), one)
        assert one.segment_leader_epochs == found.indexes.leader_epochs == whole.segment_leader_epochs
