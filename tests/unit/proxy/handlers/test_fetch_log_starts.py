"""A Fetch below the recorded log start, below that of the broker, and before all that was copied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from proxy.handlers.base import FetchSettings
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.configured_topics import TIERABLE, FakeConfigs
from tests.support.fakes.fetch_bench import LOCAL_0, P0, P1, Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason, OffsetAndEpoch

VERSIONS = [4, 12, 18]
UNAVAILABLE = ErrorCode.REPLICA_NOT_AVAILABLE


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        yield made


@pytest.mark.parametrize("version", VERSIONS)
async def test_below_both_log_starts_there_is_nothing(bench: Bench, version: int) -> None:
    bench.tier.rlmm.all_log_starts[P0] = [user_log_start(50), user_log_start(30)]
    assert codes(await bench.fetch(version, ask(version, 25))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
    response = await bench.fetch(version, ask(version, 60))
    assert records(response).startswith(bench.batches[6])
    assert response.partitions[0].log_start_offset == (50 if version >= 5 else -1)
    assert bench.cluster.epochs_asked == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_records_that_the_broker_has_again_are_readable(bench: Bench, version: int) -> None:
    """A broker lost its log start, or an unclean election gave it another history. The owner ends either."""
    await bench.tier.rlmm.put_log_start(P0, user_log_start(150))
    response = await bench.fetch(version, ask(version, 120), max_wait_ms=60_000)
    assert records(response).startswith(bench.batches[12])
    assert response.partitions[0].log_start_offset == (0 if version >= 5 else -1)
    assert bench.cluster.epochs_asked == []


async def test_one_above_the_brokers_log_start_makes_clients_wait(bench: Bench) -> None:
    """The owner deletes again, or ends it: a slow proxy may have recorded it for the log of another leader."""
    await bench.tier.rlmm.put_log_start(P0, user_log_start(150))
    assert codes(await bench.fetch(12, ask(12, 60))) == [UNAVAILABLE]


async def test_known_bounds_may_be_older_than_the_log_start(bench: Bench) -> None:
    """The leader confirms the log start, also to a client that names the leader epoch of the known bounds."""
    log = bench.cluster.logs[P0]
    assert codes(await bench.fetch(13, ask(13, 60, leader_epoch=5))) == [0]
    log.log_start_offset = 120
    await bench.tier.rlmm.put_log_start(P0, user_log_start(120))
    assert codes(await bench.fetch(13, ask(13, 60, leader_epoch=5))) == [ErrorCode.OFFSET_OUT_OF_RANGE]


@pytest.mark.parametrize("version", VERSIONS)
async def test_one_that_the_tier_contradicts_hides_nothing(bench: Bench, version: int) -> None:
    await bench.tier.rlmm.put_log_start(P0, user_log_start(50, last_epoch=3))
    for offset in (25, 60):  # unforeseen, then predicted
        response = await bench.fetch(version, ask(version, offset), max_wait_ms=60_000)
        assert codes(response) == [0]
        assert records(response).startswith(bench.batches[offset // 10])
        assert response.partitions[0].log_start_offset == (0 if version >= 5 else -1)


async def test_a_streamed_answer_leaves_it_to_the_next_request(tmp_path: Path) -> None:
    """It cannot wait for a judgement."""
    async with bench_of(tmp_path, FetchSettings(hold_bytes=200)) as bench:
        await bench.tier.rlmm.put_log_start(P0, user_log_start(50))
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 10, value_bytes=100)])
        response = await bench.fetch(13, ask(13, 25), ask_local(13, 0))
        assert bench.streamed
        assert (codes(response), records(response, 0)) == ([0, 0], b"")
        response = await bench.fetch(13, ask(13, 25), ask_local(13, 0), max_wait_ms=60_000)
        assert codes(response) == [ErrorCode.OFFSET_OUT_OF_RANGE, 0]


async def test_before_all_that_was_copied_there_is_nothing(bench: Bench) -> None:
    """Nothing is recorded for a gap at the head; a log start that was only seen deletes nothing, and hides nothing."""
    await bench.tier.rlmm.put_log_start(P1, LogStart(0, 5, LogStartReason.SEEN))
    log = bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
    assert codes(await bench.fetch(13, ask(13, 5, partition=1))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
    await bench.tier.add(P1, [batch_of(50, 10)], 50)
    log.batches, log.log_start_offset = [batch_of(60, 10)], 60
    assert codes(await bench.fetch(13, ask(13, 5, partition=1))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
    assert records(await bench.fetch(13, ask(13, 50, partition=1), max_wait_ms=60_000))
    assert bench.handler.in_neither_tier_count == 0


async def test_a_state_cleared_during_the_look_does_not_show_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))) as bench:
        bench.tier.rlmm.segments.pop(next(iter(bench.tier.rlmm.segments)))

        def cleared(partition: TopicIdPartition, offset: int) -> None:
            bench.tier.rlmm.fresh = False

        monkeypatch.setattr(bench.tier.state, "next_segment", cleared)
        assert codes(await bench.fetch(13, ask(13, 5), max_wait_ms=1)) == [UNAVAILABLE]


@pytest.mark.parametrize("is_copied_on", [True, False])
async def test_behind_all_that_was_deleted_a_gap_is_one_at_the_head(bench: Bench, is_copied_on: bool) -> None:
    """Records that the broker removed there before their copy are no recorded gap. The log begins behind them."""
    await bench.tier.add(P1, [batch_of(0, 20)], 0)
    await bench.tier.rlmm.put_log_start(P1, user_log_start(20))
    log = bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
    if is_copied_on:
        await bench.tier.add(P1, [batch_of(50, 10)], 50)
        log.batches, log.log_start_offset = [batch_of(60, 10)], 60
    for offset in (10, 20, 49):
        response = await bench.fetch(13, ask(13, offset, partition=1), max_wait_ms=60_000)
        assert codes(response) == [ErrorCode.OFFSET_OUT_OF_RANGE]
    response = await bench.fetch(13, ask(13, 60, partition=1))
    assert response.partitions[0].log_start_offset == 50
    assert bench.handler.in_neither_tier_count == 0


@pytest.mark.parametrize(
    ("trim", "told", "wait_ms"), [(OffsetAndEpoch(50, 5), UNAVAILABLE, 10), (OffsetAndEpoch(51, 3), 1, 60_000)]
)
async def test_a_trim_without_a_segment_says_that_metadata_was_lost(
    tmp_path: Path, trim: OffsetAndEpoch, told: int, wait_ms: int
) -> None:
    """If it was one of this history."""
    settings = FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=wait_ms))
    async with bench_of(tmp_path, settings) as bench:
        await bench.tier.rlmm.put_local_log_start(P1, trim)
        bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
        response = await bench.fetch(13, ask(13, 5, partition=1), max_wait_ms=wait_ms)
        assert codes(response) == [told]
        assert bench.handler.in_neither_tier_count == (told == UNAVAILABLE)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_partition_that_the_configuration_tiers_is_waited_for(tmp_path: Path, version: int) -> None:
    """Its metadata may be lost. The owner ends the wait in its first round, when it records that it saw the log."""
    settings = FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))
    async with bench_of(tmp_path, settings, TopicConfig(pattern="orders")) as bench:
        log = bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
        for _ in range(2):  # unforeseen, then predicted
            response = await bench.fetch(version, ask(version, 5, partition=1), ask_local(version, 0), max_wait_ms=1)
            assert (codes(response), records(response, 1) != b"") == ([UNAVAILABLE, 0], True)
        assert codes(await bench.fetch(version, ask(version, 50, partition=1))) == [0]
        assert codes(await bench.fetch(version, ask(version, 61, partition=1))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
        await bench.tier.rlmm.put_log_start(P1, LogStart(50, 5, LogStartReason.SEEN))
        assert codes(await bench.fetch(version, ask(version, 5, partition=1))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
        assert log.log_start_offset == 50


async def test_a_topic_that_no_owner_manages_is_the_brokers(tmp_path: Path) -> None:
    configs = FakeConfigs({"orders": {**TIERABLE, "cleanup.policy": "compact"}})
    async with bench_of(tmp_path, FetchSettings(), TopicConfig(pattern="*"), configs=configs) as bench:
        bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
        for _ in range(2):
            assert codes(await bench.fetch(13, ask(13, 5, partition=1))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
        assert configs.asked == ["orders"]


async def test_without_a_word_on_its_configuration_a_topic_is_waited_for(tmp_path: Path) -> None:
    configs = FakeConfigs(is_reachable=False)
    settings = FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))
    async with bench_of(tmp_path, settings, TopicConfig(pattern="orders"), configs=configs) as bench:
        bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
        assert codes(await bench.fetch(13, ask(13, 5, partition=1), max_wait_ms=1)) == [UNAVAILABLE]


async def test_a_streamed_answer_does_not_refuse_what_the_configuration_tiers(tmp_path: Path) -> None:
    settings = FetchSettings(hold_bytes=200, remote_log=RemoteLogConfig(fetch_max_wait_ms=10))
    async with bench_of(tmp_path, settings, TopicConfig(pattern="orders")) as bench:
        bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 10, value_bytes=100)])
        response = await bench.fetch(13, ask(13, 5, partition=1), ask_local(13, 0))
        assert bench.streamed
        assert (codes(response), records(response, 0)) == ([0, 0], b"")
        response = await bench.fetch(13, ask(13, 5, partition=1), ask_local(13, 0), max_wait_ms=1)
        assert codes(response) == [UNAVAILABLE, 0]
