"""A Fetch inside a recorded gap continues at its end: the request to the broker, and the answer to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.apis.fetch.response import FetchResponse
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from protocol.records.record_batch import RecordBatch, iterate_batches, verify_batches
from proxy.handlers.base import FetchSettings
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import fetch_frame
from tests.support.fakes.fetch_bench import LOCAL_0, P0, P1, VERSIONS, Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentState

UNAVAILABLE = ErrorCode.REPLICA_NOT_AVAILABLE
FIRST = [batch_of(0, 10, leader_epoch=1), batch_of(10, 10, leader_epoch=1)]
SECOND = [batch_of(50, 10, leader_epoch=3)]
LOCAL = [batch_of(80, 10, leader_epoch=5), batch_of(90, 10, leader_epoch=5)]


async def fill(bench: Bench) -> None:
    """P1: remote 0 to 19 and 50 to 59, local 80 to 99; the gaps between them are recorded."""
    await bench.tier.add(P1, FIRST, 0)
    await bench.tier.add(P1, SECOND, 50)
    await bench.tier.rlmm.put_log_gap(P1, LogGap(20, 50), 3)
    await bench.tier.rlmm.put_log_gap(P1, LogGap(60, 80), 5)
    bench.cluster.logs[P1] = LocalLog(list(LOCAL), 80)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        await fill(made)
        yield made


def the_batch(response: FetchResponse, index: int = 0) -> RecordBatch:
    """The one batch of that partition."""
    (batch,) = verify_batches(records(response, index))
    return batch


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_remote_tier_goes_on_behind_the_gap(bench: Bench, version: int) -> None:
    for offset in (20, 35, 49):  # unforeseen, then predicted
        sent = len(bench.cluster.requests)
        response = await bench.fetch(version, ask(version, offset, partition=1), max_wait_ms=60_000)
        assert (codes(response), records(response)) == ([0], SECOND[0])
        assert response.partitions[0].log_start_offset == (0 if version >= 5 else -1)
        assert len(bench.cluster.requests) == sent + 1
    assert bench.handler.in_neither_tier_count == 0


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_broker_goes_on_behind_the_gap(bench: Bench, version: int) -> None:
    epoch = 3 if version >= 12 else -1
    for offset in (60, 75):  # unforeseen, then predicted
        sent = len(bench.cluster.requests)
        response = await bench.fetch(
            version, ask(version, offset, partition=1, last_fetched_epoch=epoch), session_epoch=0, max_wait_ms=60_000
        )
        assert (codes(response), records(response), response.session_id) == ([0], b"".join(LOCAL), 0)
        entry = response.partitions[0]
        assert (entry.high_watermark, entry.last_stable_offset) == (100, 100)
        assert entry.log_start_offset == (0 if version >= 5 else -1)
        _, again = bench.cluster.requests[sent:]
        (asked,) = again.partitions
        assert (asked.partition, asked.fetch_offset, asked.last_fetched_epoch) == (1, 80, -1)
        assert (again.max_wait_ms, again.session_id, again.session_epoch) == (0, 0, -1)
    assert bench.last is not None
    assert bench.last.tier == "local"


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_consumer_reads_all_that_is_left(bench: Bench, version: int) -> None:
    """No answer holds records of both sides of a gap: the marker that ends a transaction may be lost in it."""
    offset, answers = 0, []
    while offset < 100:
        response = await bench.fetch(version, ask(version, offset, partition=1), isolation_level=1, max_wait_ms=60_000)
        assert codes(response) == [0]
        answers.append(records(response))
        offset = list(iterate_batches(answers[-1]))[-1].next_offset
    assert answers == [b"".join(FIRST), SECOND[0], b"".join(LOCAL)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("isolation_level", [0, 1])
async def test_where_nothing_follows_the_position_reaches_the_high_watermark(
    bench: Bench, version: int, isolation_level: int
) -> None:
    bench.cluster.logs[P1] = LocalLog([], 80)
    response = await bench.fetch(
        version, ask(version, 65, partition=1), isolation_level=isolation_level, max_wait_ms=60_000
    )
    batch = the_batch(response)
    assert (batch.base_offset, batch.next_offset, batch.leader_epoch) == (79 if version >= 11 else 64, 80, 3)
    assert batch.is_control
    assert response.partitions[0].high_watermark == 80
    assert response.aborted_transactions(response.partitions[0]) == (() if isolation_level else None)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("isolation_level", [0, 1])
async def test_records_of_a_batch_that_begins_in_the_gap_are_not_shown(
    tmp_path: Path, version: int, isolation_level: int
) -> None:
    """The gap ends within the batch, in the remote tier at 55 and in the local one at 85."""
    async with bench_of(tmp_path) as bench:
        await bench.tier.add(P1, FIRST, 0)
        await bench.tier.add(P1, SECOND, 55)
        await bench.tier.rlmm.put_log_gap(P1, LogGap(20, 55), 3)
        await bench.tier.rlmm.put_log_gap(P1, LogGap(60, 85), 5)
        bench.cluster.logs[P1] = LocalLog(list(LOCAL), 85)

        async def fetch(offset: int) -> FetchResponse:
            asked = ask(version, offset, partition=1)
            return await bench.fetch(version, asked, isolation_level=isolation_level, max_wait_ms=60_000)

        for start, end, behind in ((20, 55, SECOND[0]), (60, 85, b"".join(LOCAL))):
            for offset in (start, end - 1):
                batch = the_batch(await fetch(offset))
                assert (batch.is_control, batch.next_offset) == (True, end)
            assert records(await fetch(end)) == behind


async def test_the_batch_across_a_gap_is_of_the_epoch_that_the_client_has_seen(bench: Bench) -> None:
    """It may have read lost records, of an epoch that only it knows."""
    bench.cluster.logs[P1] = LocalLog([], 80)
    response = await bench.fetch(13, ask(13, 65, partition=1, last_fetched_epoch=4), max_wait_ms=60_000)
    assert the_batch(response).leader_epoch == 4
    bench.tier.rlmm.segments.clear()
    response = await bench.fetch(13, ask(13, 65, partition=1), max_wait_ms=60_000)
    assert the_batch(response).leader_epoch == -1


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_open_transaction_right_behind_the_gap_holds_no_position_back(bench: Bench, version: int) -> None:
    bench.cluster.logs[P1].last_stable_offset = 80
    response = await bench.fetch(version, ask(version, 65, partition=1), isolation_level=1, max_wait_ms=60_000)
    batch = the_batch(response)
    assert (batch.next_offset, batch.is_control) == (80, True)
    assert (response.partitions[0].high_watermark, response.partitions[0].last_stable_offset) == (100, 80)
    response = await bench.fetch(version, ask(version, 65, partition=1), max_wait_ms=60_000)
    assert records(response) == b"".join(LOCAL)


@pytest.mark.parametrize(
    ("offset", "epoch", "diverging"),
    [
        (20, 1, None),
        (30, 2, None),  # between the neighbours': it may have written what was lost
        (50, 2, None),
        (55, 2, (2, 50)),
        (30, 0, (0, 0)),
        (60, 3, None),
        (70, 4, None),
        (70, 2, (2, 50)),
        (70, 1, (1, 50)),
    ],
)
async def test_an_epoch_that_may_have_lost_records_diverges_only_behind_the_gap(
    bench: Bench, offset: int, epoch: int, diverging: tuple[int, int] | None
) -> None:
    response = await bench.fetch(13, ask(13, offset, partition=1, last_fetched_epoch=epoch), max_wait_ms=60_000)
    assert codes(response) == [0]
    assert response.diverging_epoch(response.partitions[0]) == diverging
    assert bool(records(response)) is (diverging is None)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_gap_at_the_head_belongs_to_the_log_and_is_passed_over(bench: Bench, version: int) -> None:
    await bench.tier.rlmm.put_log_start(P1, user_log_start(30))
    response = await bench.fetch(version, ask(version, 35, partition=1), max_wait_ms=60_000)
    assert (codes(response), records(response)) == ([0], SECOND[0])
    assert response.partitions[0].log_start_offset == (50 if version >= 5 else -1)
    response = await bench.fetch(version, ask(version, 95, partition=1), max_wait_ms=60_000)
    assert response.partitions[0].log_start_offset == (50 if version >= 5 else -1)
    response = await bench.fetch(version, ask(version, 25, partition=1), max_wait_ms=60_000)
    assert codes(response) == [ErrorCode.OFFSET_OUT_OF_RANGE]


@pytest.mark.parametrize("offset", [20, 34, 35, 49])
async def test_gaps_that_follow_each_other_are_one(bench: Bench, offset: int) -> None:
    await bench.tier.rlmm.put_log_gap(P1, LogGap(20, 35), 2)
    await bench.tier.rlmm.put_log_gap(P1, LogGap(35, 50), 3)
    response = await bench.fetch(13, ask(13, offset, partition=1), max_wait_ms=60_000)
    assert records(response) == SECOND[0]


async def test_only_known_remote_records_are_read_without_the_metadata_topic(tmp_path: Path) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))) as bench:
        await fill(bench)
        bench.tier.rlmm.fresh = False
        bench.tier.rlmm.final = True
        assert records(await bench.until_remote(13, ask(13, 35, partition=1))) == SECOND[0]
        response = await bench.fetch(13, ask(13, 65, partition=1), max_wait_ms=1)
        assert codes(response) == [UNAVAILABLE]


@pytest.mark.parametrize("is_remote", [True, False])
async def test_unrecorded_offsets_behind_a_gap_are_not_skipped(tmp_path: Path, is_remote: bool) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))) as bench:
        await fill(bench)
        gap, offset = (LogGap(20, 49), 30) if is_remote else (LogGap(60, 79), 70)
        await bench.tier.rlmm.put_log_gap(P1, gap, 3)
        for asked in (offset, gap.next_offset):
            response = await bench.fetch(13, ask(13, asked, partition=1), max_wait_ms=1)
            assert codes(response) == [UNAVAILABLE]
        assert bench.handler.in_neither_tier_count == 2


@pytest.mark.parametrize("is_copied", [True, False])
async def test_a_fetch_in_a_gap_goes_on_where_the_log_begins_now(bench: Bench, is_copied: bool) -> None:
    """The known bounds are old. The records at their log start are remote now, or the gap grew over them."""
    asked = ask(13, 65, partition=1, leader_epoch=5)
    assert records(await bench.fetch(13, asked, max_wait_ms=60_000)) == b"".join(LOCAL)
    if is_copied:
        await bench.tier.add(P1, LOCAL[:1], 80)
    else:
        await bench.tier.rlmm.put_log_gap(P1, LogGap(60, 90), 5)
    bench.cluster.logs[P1].log_start_offset = 90
    assert records(await bench.fetch(13, asked, max_wait_ms=60_000)) == LOCAL[0 if is_copied else 1]


async def test_a_leader_that_has_some_of_the_gap_serves_it(bench: Bench) -> None:
    """Retention removes records of each replica in its own time."""
    kept = batch_of(70, 10, leader_epoch=4)
    bench.cluster.logs[P1] = LocalLog([kept, *LOCAL], 70)
    response = await bench.fetch(13, ask(13, 65, partition=1), max_wait_ms=60_000)
    assert records(response) == kept + b"".join(LOCAL)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_remote", [True, False])
async def test_deleted_records_of_the_batch_behind_a_gap_are_not_shown(
    bench: Bench, version: int, is_remote: bool
) -> None:
    """DeleteRecords ended inside a batch. To a client at its end, the client itself drops the deleted records."""
    across, rest = batch_of(75, 10, leader_epoch=5), [batch_of(85, 15, leader_epoch=5)]
    bench.cluster.logs[P1] = LocalLog([across, *rest], 80)
    if is_remote:
        await bench.tier.add(P1, [across], 80)
        bench.cluster.logs[P1] = LocalLog(rest, 85)
    for offset in (65, 78):  # unforeseen, then predicted
        response = await bench.until_remote(version, ask(version, offset, partition=1), max_wait_ms=60_000)
        batch = the_batch(response)
        assert (codes(response), batch.next_offset, batch.is_control) == ([0], 80, True)
    response = await bench.until_remote(version, ask(version, 80, partition=1), max_wait_ms=60_000)
    assert records(response).startswith(across)


@pytest.mark.parametrize("version", VERSIONS)
async def test_neighbours_in_one_request_are_served_beside_each_other(bench: Bench, version: int) -> None:
    """One in a gap before the local log, one remote, one local."""
    remote = b""
    while not remote:  # the store is waited for by the next request
        response = await bench.fetch(
            version, ask(version, 65, partition=1), ask(version, 25), ask_local(version, 0), max_wait_ms=60_000
        )
        assert codes(response) == [0, 0, 0]
        assert records(response, 0) == b"".join(LOCAL)
        assert records(response, 2) == bench.cluster.logs[LOCAL_0].batches[0]
        remote = records(response, 1)
        await asyncio.sleep(0.001)
    assert remote.startswith(bench.batches[2])


@pytest.mark.parametrize("version", VERSIONS)
async def test_two_partitions_in_gaps_are_asked_for_at_once(bench: Bench, version: int) -> None:
    log = bench.cluster.logs[P0]
    log.log_start_offset = 150
    await bench.tier.rlmm.put_log_gap(P0, LogGap(120, 150), 5)
    response = await bench.fetch(version, ask(version, 130), ask(version, 65, partition=1), max_wait_ms=60_000)
    assert [records(response, n) for n in (0, 1)] == [b"".join(bench.batches[15:]), b"".join(LOCAL)]
    _, again = bench.cluster.requests
    assert [(asked.partition, asked.fetch_offset) for asked in again.partitions] == [(0, 150), (1, 80)]


async def test_without_room_it_comes_next_and_is_never_out_of_range(bench: Bench) -> None:
    size = len(LOCAL[0])
    bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 10)])
    asks = [ask_local(13, 0), ask(13, 65, partition=1)]
    response = await bench.fetch(13, *asks, max_bytes=size, max_wait_ms=60_000)
    assert codes(response) == [0, 0]
    assert [records(response, n) for n in (0, 1)] == [bench.cluster.logs[LOCAL_0].batches[0], b""]
    response = await bench.fetch(13, *reversed(asks), max_bytes=size, max_wait_ms=60_000)
    assert [records(response, n) for n in (0, 1)] == [LOCAL[0], b""]


async def test_a_large_answer_streams_and_what_lies_behind_the_gap_comes_next(tmp_path: Path) -> None:
    async with bench_of(
        tmp_path, FetchSettings(hold_bytes=500, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    ) as bench:
        await fill(bench)
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 1, value_bytes=3000)])
        for version in VERSIONS:
            asks = [ask(version, 65, partition=1), ask(version, 35, partition=1), ask_local(version, 0)]
            for one, wanted in zip(asks[:2], (LOCAL[0], SECOND[0]), strict=True):
                connection_id = version * 100 + one.offset
                response = await bench.fetch(version, one, asks[2], connection_id=connection_id)
                assert bench.streamed
                assert (codes(response), records(response, 0)) == ([0, 0], b"")
                response = await bench.until_remote(version, one, asks[2], connection_id=connection_id)
                assert records(response, 0).startswith(wanted)


async def test_a_fetch_in_a_gap_with_later_requests_is_answered_empty_and_late(bench: Bench) -> None:
    """The client has sent more requests already: it is answered after its own wait, as an idle partition is."""
    in_gap = ask(13, 65, partition=1)
    started_ms = monotonic_ms()
    response = await bench.send(fetch_frame(13, [in_gap], max_wait_ms=30), may_forward=False)
    assert (codes(response), records(response)) == ([0], b"")
    assert response.partitions[0].high_watermark >= 60
    assert monotonic_ms() - started_ms >= 30
    assert len(bench.cluster.requests) == 1
    async with asyncio.timeout(60):
        frame = fetch_frame(13, [in_gap, ask_local(13, 0)], max_wait_ms=600_000)
        response = await bench.send(frame, may_forward=False)
    assert codes(response) == [0, 0]
    assert records(response, 1)


async def test_a_broker_that_does_not_answer_again_keeps_nothing_of_others_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[asyncio.Future[memoryview]] = []

    def silent(exchange: FakeExchange, frame: Buffer) -> Coroutine[None, None, memoryview]:
        asked.append(asyncio.get_running_loop().create_future())
        return asyncio.wait_for(asked[0], None)

    monkeypatch.setattr(FakeExchange, "try_forward", silent)
    async with asyncio.timeout(60):
        response = await bench.fetch(13, ask(13, 65, partition=1), ask_local(13, 0), max_wait_ms=600_000)
    assert len(asked) == 1
    assert (codes(response), records(response, 0)) == ([0, 0], b"")
    assert records(response, 1)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NOT_LEADER_OR_FOLLOWER),
        (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        (ErrorCode.OFFSET_OUT_OF_RANGE, UNAVAILABLE),
    ],
)
async def test_the_brokers_errors_behind_the_gap_are_relayed_except_a_reset(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int, told: int
) -> None:
    poll = FakeExchange._poll

    async def refused(exchange: FakeExchange, frame: bytes) -> memoryview:
        bench.cluster.logs[P1].error_code = code
        return await poll(exchange, frame)

    monkeypatch.setattr(FakeExchange, "_poll", refused)
    async with asyncio.timeout(60):
        response = await bench.fetch(13, ask(13, 65, partition=1), ask_local(13, 0), max_wait_ms=600_000)
    assert codes(response) == [told, 0]


async def test_without_the_leaders_answer_no_consumer_skips_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        raise BrokerError("no answer", retriable=True)

    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))) as bench:
        await fill(bench)
        monkeypatch.setattr(bench.cluster, "bounds", silent)
        for offset in (35, 65):
            response = await bench.fetch(13, ask(13, offset, partition=1), max_wait_ms=1)
            assert codes(response) == [UNAVAILABLE]
        assert len(bench.cluster.requests) == 2


@pytest.mark.parametrize("offset", [5, 19, 35, 79])
async def test_offsets_behind_an_attempt_at_the_head_are_unknown(bench: Bench, offset: int) -> None:
    """When the attempt has ended, those behind it are in a gap. Until then, a reset would skip local records."""
    rlmm = bench.tier.rlmm
    first, second = rlmm.state.list_remote_log_segments(P1)
    rlmm.segments[first.segment_id] = replace(first, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
    del rlmm.segments[second.segment_id]
    rlmm.recorded_gaps.clear()
    assert codes(await bench.fetch(12, ask(12, offset, partition=1))) == [UNAVAILABLE]
    del rlmm.segments[first.segment_id]
    assert codes(await bench.fetch(12, ask(12, offset, partition=1))) == [ErrorCode.OFFSET_OUT_OF_RANGE]
