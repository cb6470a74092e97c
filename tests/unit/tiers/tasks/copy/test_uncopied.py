"""How many bytes an owner takes for not remote, from the size of the leader's replica."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench, workbench
from tiers.metadata.remote_log import RemoteLog
from tiers.model.log_source import LocalLogBounds


def produce(bench: Workbench, count: int, value_bytes: int = 15) -> None:
    for _ in range(count):
        bench.log.append(batch_of(bench.log.end_offset, 10, value_bytes=value_bytes, timestamp=bench.wall_ms))


def size_from(bench: Workbench, offset: int) -> int:
    return len(bench.log.bytes_of(offset, bench.log.end_offset - 1))


Act = tuple[str, int]
NAMES = "produce", "copy", "trim", "expire", "remove", "restart", "elect", "refuse"
ACTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 9)))


def left_bytes(bench: Workbench, bounds: LocalLogBounds) -> int:
    first = RemoteLog(bench.state, PARTITION).first_uncopied(bounds)
    return size_from(bench, first) if first < bench.log.end_offset else 0


@given(acts=ACTS, file_bytes=st.integers(500, 5_000))
def test_records_of_one_size_are_never_estimated_too_low(
    tmp_path_factory: pytest.TempPathFactory, acts: list[Act], file_bytes: int
) -> None:
    async def run() -> None:
        async with workbench(tmp_path_factory.mktemp("bench")) as bench:
            bench.log.has_large_files = True
            for act, count in acts:
                match act:
                    case "produce":
                        produce(bench, count)
                    case "copy":
                        await bench.copy()
                    case "trim":
                        bench.log.log_start_offset = max(
                            [bench.log.log_start_offset, *(end + 1 for _, end in bench.finished[:count])]
                        )
                    case "expire":
                        await bench.expire(replace(POLICY, retention_bytes=300 * count))
                    case "elect":
                        bench.log.leader_epoch += 1
                    case "remove":
                        bench.log.remove_files(file_bytes)
                    case "restart":
                        bench.restart()
                    case "refuse":
                        bench.log.has_size_right = count > 5
                left = left_bytes(bench, await bench.survey())
                uncopied = bench.copy_task.uncopied
                assert uncopied.at_least() <= left
                assert left <= uncopied.size_bytes + 1 or (not bench.segments and not bench.log.has_size_right)

    asyncio.run(run())


async def test_an_owner_begins_with_the_density_of_the_newest_segment(bench: Workbench) -> None:
    """The broker has trimmed records in its files, and they count for nothing."""
    bench.log.has_large_files = True
    produce(bench, 5)
    await bench.copy()
    assert bench.finished == [(0, 29)]
    bench.log.log_start_offset = 30
    bench.restart()
    await bench.survey()
    assert bench.copy_task.uncopied.size_bytes == size_from(bench, 30)


async def test_a_size_that_is_known_late_replaces_the_guess(bench: Workbench) -> None:
    """The broker's last answer is older than the topic."""
    bench.log.has_size_right = False
    produce(bench, 5, value_bytes=300)
    await bench.survey()
    bench.log.has_size_right = True
    await bench.survey()
    assert bench.copy_task.uncopied.size_bytes == len(bench.log.records)


async def test_a_read_to_the_end_corrects_the_estimate(bench: Workbench) -> None:
    """The newest segment has large records. The owner of the small ones behind it begins anew."""
    produce(bench, 1, value_bytes=200)
    produce(bench, 3, value_bytes=1)
    await bench.copy()
    assert bench.finished == [(0, 9)]
    bench.restart()
    for _ in range(2):
        await bench.copy()
    reads = list(bench.log.reads)
    await bench.copy()
    assert (bench.finished, bench.log.reads) == ([(0, 9)], reads)
    assert bench.copy_task.uncopied.size_bytes == size_from(bench, 10)


async def test_segments_in_the_spool_are_not_due_again(bench: Workbench) -> None:
    bench.log.has_large_files = True
    produce(bench, 8)
    await bench.survey()
    whole_bytes, segment_bytes = len(bench.log.records), len(bench.log.bytes_of(0, 29))
    bench.end_after = "segment-kept"
    with pytest.raises(ProcessEnded):
        await bench.copy()
    for offset, expected in ((0, whole_bytes), (30, whole_bytes - segment_bytes)):
        assert bench.copy_task.uncopied.between(offset) == expected
    bench.end_after = ""
    while await bench.copy():
        pass
    assert bench.finished == [(0, 29), (30, 59)]
    assert bench.copy_task.uncopied.between(60) == len(bench.log.bytes_of(60, 79))
