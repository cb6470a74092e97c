"""The records that are not remote: how many bytes an owner takes them for, and when it copies them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.steady_log import SteadyLog
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench, workbench
from tiers.metadata.remote_log import RemoteLog
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.copy.uncopied import DUE_SHARE, MIN_BATCH_BYTES, Uncopied, age_of_oldest, copy_due
from tiers.tasks.hold import HoldReason

NOW_MS = 1_700_000_000_000


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
            grown_from = grown_to = 0
            for act, count in acts:
                match act:
                    case "produce":
                        produce(bench, count)
                    case "copy":
                        await bench.copy()
                        bounds = await bench.log.bounds(PARTITION, 1000)
                        assert bench.copy_task.uncopied.at_least() <= left_bytes(bench, bounds)
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
                bounds = await bench.survey()
                if bench.log.end_offset > grown_to:
                    grown_from, grown_to = grown_to, bench.log.end_offset
                left, uncopied = left_bytes(bench, bounds), bench.copy_task.uncopied
                assert uncopied.at_least() <= left
                most = uncopied.at_most(bounds.high_watermark)
                if most is not None and bench.log.has_size_right:
                    whole = [start for start, _ in bench.finished if start >= bounds.log_start_offset]
                    in_segments = size_from(bench, whole[0]) - left if whole else 0
                    # The broker may have answered at any time since the survey before.
                    since = (
                        max(size_from(bench, grown_from), MIN_BATCH_BYTES * (grown_to - grown_from)) if grown_to else 0
                    )
                    assert left <= most <= len(bench.log.records) - in_segments + since
                assert left <= uncopied.size_bytes + 1 or (not bench.segments and not bench.log.has_size_right)

    asyncio.run(run())


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40), rounds=st.integers(1, 6))
def test_the_estimate_grows_with_the_replica(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rounds: int
) -> None:
    """Records of any size are due in the round in which they fill a segment."""

    async def run() -> None:
        async with workbench(tmp_path_factory.mktemp("bench")) as bench:
            for number in range(rounds):
                for value_bytes in sizes[number::rounds]:
                    produce(bench, 1, value_bytes)
                while await bench.copy():
                    pass
                assert left_bytes(bench, await bench.survey()) < POLICY.segment_bytes
                assert await bench.remote_bytes() == bench.log.records[: len(await bench.remote_bytes())]

    asyncio.run(run())


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


amounts = st.integers(0, 1 << 40)
shares = st.floats(0, 2)


@given(offsets=amounts, size_bytes=amounts, age_ms=amounts, share=shares)
def test_one_reason_is_enough_and_none_is_too_few(offsets: int, size_bytes: int, age_ms: int, share: float) -> None:
    hold = copy_due(POLICY, Uncopied(offsets, size_bytes, age_ms, share), NOW_MS)
    reasons = size_bytes >= POLICY.segment_bytes, age_ms >= POLICY.segment_ms, share >= DUE_SHARE
    assert (hold is None) == (offsets > 0 and any(reasons))
    if hold is not None and offsets:
        assert (hold.reason, hold.at_ms) == (HoldReason.NOT_DUE, NOW_MS + POLICY.segment_ms - age_ms)


@pytest.mark.parametrize(
    ("lag_ms", "lag_bytes", "age_ms", "size_bytes", "share", "is_due"),
    [
        (0, -1, 0, 1_000, 0.0, True),  # the defaults
        (0, 5_000, 0, 1_000, 0.0, True),
        (9_000, 0, 0, 1_000, 0.0, True),
        (9_000, -1, 8_999, 1 << 40, 0.0, False),
        (9_000, -1, 9_000, 1_000, 0.0, True),
        (9_000, -1, 9_000, 999, 0.0, False),
        (90_000, -1, 89_999, 999, 0.0, False),
        (90_000, -1, 90_000, 999, 0.0, True),
        (9_000, 5_000, 0, 5_999, 0.0, False),
        (9_000, 5_000, 0, 6_000, 0.0, True),
        (-1, 5_000, 1 << 40, 5_999, 0.0, False),
        (-1, -1, 1 << 40, 1 << 40, DUE_SHARE - 0.01, False),
        (-1, -1, 0, 1, DUE_SHARE, True),
    ],
)
def test_one_lag_that_is_over_ends_the_delay(
    lag_ms: int, lag_bytes: int, age_ms: int, size_bytes: int, share: float, is_due: bool
) -> None:
    """A segment has 1,000 bytes, or is a minute old."""
    policy = replace(POLICY, copy_lag_ms=lag_ms, copy_lag_bytes=lag_bytes)
    assert (copy_due(policy, Uncopied(1, size_bytes, age_ms, share, lag_ms=age_ms), NOW_MS) is None) == is_due


@given(
    timestamp_ms=st.none() | st.integers(0, 2 * NOW_MS),
    finished_ms=st.none() | st.integers(0, NOW_MS),
    known_ms=amounts,
)
def test_a_timestamp_makes_no_record_older_than_the_last_copy(
    timestamp_ms: int | None, finished_ms: int | None, known_ms: int
) -> None:
    age_ms = age_of_oldest(timestamp_ms, finished_ms, known_ms, NOW_MS)
    assert age_ms >= known_ms
    if finished_ms is None:
        assert age_ms == known_ms
    else:
        assert age_ms <= max(known_ms, NOW_MS - finished_ms)
        is_credible = timestamp_ms is not None and finished_ms <= timestamp_ms <= NOW_MS
        assert age_ms == max(known_ms, NOW_MS - (timestamp_ms or 0 if is_credible else finished_ms))


async def test_a_restart_does_not_reset_the_age(bench: Workbench) -> None:
    """The owner restarts more often than every `segment.ms`."""
    produce(bench, 4)
    await bench.copy()
    for _ in range(3):
        assert bench.finished == [(0, 29)]
        bench.wall_ms += POLICY.segment_ms // 3
        bench.now_ms += POLICY.segment_ms // 3
        bench.restart()
        await bench.copy()
    assert bench.finished == [(0, 29), (30, 39)]


async def test_the_broker_retention_makes_any_size_due(bench: Workbench) -> None:
    produce(bench, 1)
    bounds = await bench.survey()
    await bench.copy_task.run(POLICY, bounds, 0, retention_share=DUE_SHARE - 0.01)
    assert bench.finished == []
    await bench.copy_task.run(POLICY, bounds, 0, retention_share=DUE_SHARE)
    assert [each.metadata.end_offset for each in bench.services.spool.kept()] == [9]
    await bench.attempts.run(bounds, 0)
    assert bench.finished == [(0, 9)]


async def test_what_lies_below_an_open_transaction_waits_for_its_age(bench: Workbench) -> None:
    produce(bench, 8)
    bench.log.last_stable_offset = 40
    for _ in range(3):
        await bench.copy()
    assert bench.finished == [(0, 29)]
    assert bench.log.reads == [0, 10, 20, 30, 30], "the last one: the age of the first batch"
    bench.now_ms += POLICY.segment_ms
    await bench.copy()
    assert bench.finished == [(0, 29), (30, 39)]
    assert bench.spooled() == []


async def test_what_arrives_since_the_brokers_answer_counts(bench: Workbench) -> None:
    """A slow broker is asked once a minute, and the answer may be older than the first survey of an owner."""
    produce(bench, 10, value_bytes=100)
    await bench.copy(replace(POLICY, segment_ms=0))
    copied = bench.segments[-1]
    answered = await bench.log.size_bytes(PARTITION, 1000)
    bench.restart()
    for _ in range(3):
        produce(bench, 10, value_bytes=100)
        bounds = await bench.log.bounds(PARTITION, 1000)
        bench.copy_task.uncopied.survey(answered, bounds)
        most = bench.copy_task.uncopied.at_most(bounds.high_watermark)
        assert most is not None
        assert most >= size_from(bench, copied.end_offset + 1)


@pytest.mark.parametrize("has_size_right", [True, False])
@pytest.mark.parametrize("bytes_per_s", [10_000, 70_000, 400_000])
async def test_segments_are_large_and_reads_are_few(bench: Workbench, bytes_per_s: int, has_size_right: bool) -> None:
    """The sizes are a sixteenth of the defaults. The rates of producers and the sizes of their batches are as they are.

    bench/mean_segments.py measures the same for more kinds of producers."""
    segment_bytes, segment_ms, fetch_bytes = 16 << 20, 3_600_000 // 16, 1 << 20
    log = bench.log = SteadyLog(lambda: bench.wall_ms, bytes_per_s, 16_384)
    log.has_size_right = has_size_right
    settings = replace(bench.services.settings, fetch_bytes=fetch_bytes, verify_bytes=fetch_bytes)
    bench.services = replace(bench.services, source=log, settings=settings)
    bench.restart()
    while len(bench.segments) < 6:
        await bench.copy_all(replace(POLICY, segment_bytes=segment_bytes, segment_ms=segment_ms))
        bench.now_ms += 30_000
        bench.wall_ms += 30_000
    copied_bytes = sum(one.segment_size_bytes for one in bench.segments)
    assert copied_bytes / len(bench.segments) >= 0.5 * min(segment_bytes, bytes_per_s * segment_ms // 1000)
    assert log.read_bytes <= 1.2 * copied_bytes
