"""Fetch over two tiers, as a client sees it: requests in, answers out, at every version."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import pytest

from protocol.errors import ErrorCode, ProtocolError
from proxy.handlers.base import FetchSettings
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import Ask, fetch_frame
from tests.support.fakes.fetch_bench import (
    BATCH,
    LOCAL_0,
    LOCAL_ID,
    P0,
    P1,
    VERSIONS,
    Bench,
    ask,
    ask_local,
    bench_of,
    codes,
    parse,
    records,
)
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.model.ids import TopicIdPartition


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        yield made


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_trimmed_offset_is_served_by_the_first_request(bench: Bench, version: int) -> None:
    response = await bench.fetch(version, ask(version, 25))
    assert codes(response) == [0]
    assert records(response).startswith(bench.batches[2])
    entry = response.partitions[0]
    assert (entry.high_watermark, entry.last_stable_offset) == (200, 200)
    assert entry.log_start_offset == (0 if version >= 5 else -1)
    assert response.session_id == 0
    assert bench.last is not None
    assert bench.last.tier == "remote"


@pytest.mark.parametrize("are_bounds_known", [False, True])
async def test_the_log_names_the_topic_of_a_read_that_failed(
    bench: Bench, caplog: pytest.LogCaptureFixture, are_bounds_known: bool
) -> None:
    """The client names the topic by its id."""
    caplog.set_level(logging.INFO)
    if are_bounds_known:
        await bench.fetch(13, ask(13, 25))
    await bench.tier.storage.close()
    await bench.fetch(13, ask(13, 95))
    (failed,) = [each for each in caplog.records if each.msg.startswith("remote read failed")]
    assert vars(failed)["partition"] == "orders-0"


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_log_start_of_local_answers_is_the_tiers(bench: Bench, version: int) -> None:
    response = await bench.fetch(version, ask(version, 150), ask_local(version, 0))
    assert [p.log_start_offset for p in response.partitions] == ([0, 0] if version >= 5 else [-1, -1])
    assert records(response) == b"".join(bench.batches[15:])
    bench.cluster.logs[LOCAL_0].log_start_offset = 3
    response = await bench.fetch(version, ask_local(version, 5))
    assert response.partitions[0].log_start_offset == (3 if version >= 5 else -1)


@pytest.mark.parametrize("version", [7, 18])
async def test_a_session_without_a_remote_partition_is_the_brokers_own(bench: Bench, version: int) -> None:
    frame = fetch_frame(version, [ask_local(version, 0)], session_epoch=0)
    exchange = FakeExchange(bench.cluster, frame)
    action, respond = bench.handler.on_request(exchange)
    assert isinstance(action, Forward)
    assert action.frame == frame
    broker_answer = bench.cluster.answer(frame)
    assert respond is not None
    answer = respond(memoryview(broker_answer))
    assert not isinstance(answer, Coroutine)
    assert b"".join(answer) == broker_answer
    assert not exchange.counts_decoded


@pytest.mark.parametrize("session_epoch", [1, 2**31 - 1])
async def test_the_epochs_of_a_session_are_the_brokers_to_count(bench: Bench, session_epoch: int) -> None:
    """Also on a connection that was sent to the remote tier before; the greatest epoch is followed by 1."""
    await bench.fetch(17, ask(17, 0))
    frame = fetch_frame(17, [ask_local(17, 0)], session_id=77, session_epoch=session_epoch)
    action, _ = bench.handler.on_request(FakeExchange(bench.cluster, frame))
    assert isinstance(action, Forward)
    assert action.frame == frame


@pytest.mark.parametrize("version", [7, 18])
async def test_a_session_with_a_remote_partition_is_dropped_and_closed_upstream(bench: Bench, version: int) -> None:
    response = await bench.fetch(version, ask(version, 0), session_epoch=0)
    assert response.session_id == 0
    assert bench.cluster.requests[-1].session_epoch == 0
    await bench.fetch(version, ask(version, 10), session_epoch=0)
    assert (bench.cluster.requests[-1].session_id, bench.cluster.requests[-1].session_epoch) == (77, -1)
    await bench.fetch(version, ask(version, 150), session_epoch=0)
    assert (bench.cluster.requests[-1].session_id, bench.cluster.requests[-1].session_epoch) == (0, 0)


@pytest.mark.parametrize("version", [7, 18])
async def test_an_unseen_offset_of_an_incremental_request_needs_a_full_one(bench: Bench, version: int) -> None:
    """The broker's session implies a partition that this request does not name."""
    frame = fetch_frame(version, [], session_id=77, session_epoch=4)
    exchange = FakeExchange(bench.cluster, frame)
    _, respond = bench.handler.on_request(exchange)
    assert respond is not None
    answer = respond(memoryview(bench.cluster.answer(fetch_frame(version, [ask(version, 3)], session_epoch=0))))
    assert isinstance(answer, Coroutine)
    response = parse(version, await answer)
    assert exchange.counts_decoded
    assert (codes(response), records(response), response.session_id) == ([0], b"", 0)
    assert response.partitions[0].high_watermark >= 100
    response = await bench.fetch(version, ask(version, 3), session_epoch=0)
    assert records(response).startswith(bench.batches[0])
    assert bench.cluster.requests[-1].session_epoch == -1
    assert bench.cluster.requests[-1].max_wait_ms == 0


async def test_a_predicted_read_begins_before_the_broker_answers(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    asked = bench.cluster.bounds_asked
    exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 60, leader_epoch=5)]))
    bench.tier.storage.asked.clear()
    action, respond = bench.handler.on_request(exchange)
    assert isinstance(action, Forward)
    assert action.hold_bytes is None
    await bench.tier.storage.asked.wait()
    assert respond is not None
    answer = respond(memoryview(bench.cluster.answer(action.frame)))
    assert isinstance(answer, Coroutine)
    assert records(parse(13, await answer)).startswith(bench.batches[6])
    assert bench.cluster.bounds_asked == asked


async def test_predicted_bytes_are_released_only_after_the_brokers_refusal(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.cluster.logs[P0].error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    response = await bench.fetch(13, ask(13, 0))
    assert codes(response) == [ErrorCode.TOPIC_AUTHORIZATION_FAILED]
    assert records(response) == b""


async def test_no_remote_read_begins_on_a_connection_that_was_not_authorized(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0), connection_id=1)
    gets = len(bench.tier.storage.gets)
    bench.cluster.logs[P0].error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    await bench.fetch(13, ask(13, 60), connection_id=2)
    assert len(bench.tier.storage.gets) == gets


async def test_a_store_that_is_down_is_an_empty_answer_after_the_deadline(tmp_path: Path) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=60))) as bench:
        bench.tier.storage.is_down = True
        started_ms = monotonic_ms()
        response = await bench.fetch(13, ask(13, 0), max_wait_ms=10)
        assert (codes(response), records(response)) == ([0], b"")
        assert monotonic_ms() - started_ms >= 60
        assert bench.handler.purgatory.pending_count == 0


async def test_damaged_bytes_are_an_error_never_an_answer(tmp_path: Path) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=250))) as bench:
        bench.tier.storage.damage = lambda data: bytes(len(data))
        for max_wait_ms in (250, 1_000, 4_000, 16_000, 60_000):
            response = await bench.fetch(13, ask(13, 0), max_wait_ms=max_wait_ms)
            assert records(response) == b""
            if codes(response) != [0]:  # empty while it is still read
                break
        assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE]


@pytest.mark.parametrize("version", VERSIONS)
async def test_offsets_in_neither_tier_are_out_of_range(bench: Bench, version: int) -> None:
    assert codes(await bench.fetch(version, ask(version, 201))) == [1]
    await bench.tier.rlmm.put_log_start(P0, user_log_start(30))
    assert codes(await bench.fetch(version, ask(version, 29))) == [1]
    assert records(await bench.fetch(version, ask(version, 30))).startswith(bench.batches[3])
    bench.cluster.logs[LOCAL_0].log_start_offset = 5
    assert codes(await bench.fetch(version, ask_local(version, 0))) == [1]


@pytest.mark.parametrize("version", VERSIONS)
async def test_nothing_is_relayed_as_out_of_range_while_the_metadata_is_stale(tmp_path: Path, version: int) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))) as bench:
        bench.tier.rlmm.fresh = False
        bench.cluster.logs[LOCAL_0].log_start_offset = 5
        response = await bench.fetch(version, ask(version, 0), ask_local(version, 0), max_wait_ms=1)
        assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE] * 2


@pytest.mark.parametrize("hold_bytes", [0, 100_000])
async def test_an_internal_topic_is_out_of_range_with_stale_metadata_too(tmp_path: Path, hold_bytes: int) -> None:
    async with bench_of(tmp_path, FetchSettings(hold_bytes=hold_bytes)) as bench:
        bench.tier.rlmm.fresh = False
        bench.cluster.topics = {"__consumer_offsets": LOCAL_ID}
        bench.cluster.logs[LOCAL_0].log_start_offset = 5
        for topic, version in ((LOCAL_ID, 13), ("__consumer_offsets", 12)):
            response = await bench.fetch(version, Ask(topic, 0, 0), max_wait_ms=1)
            assert codes(response) == [ErrorCode.OFFSET_OUT_OF_RANGE]
            assert bench.streamed == (hold_bytes == 0)


@pytest.mark.parametrize("version", VERSIONS)
async def test_known_segments_are_read_on_when_the_metadata_topic_is_gone(tmp_path: Path, version: int) -> None:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10))) as bench:
        bench.tier.rlmm.fresh = False
        bench.tier.rlmm.final = True
        response = await bench.until_remote(version, ask(version, 30))
        assert records(response).startswith(bench.batches[3])
        await bench.tier.rlmm.put_log_start(P0, user_log_start(30))
        bench.cluster.logs[LOCAL_0].log_start_offset = 5
        for asked in (ask(version, 29), ask(version, 201), ask_local(version, 0)):
            assert codes(await bench.fetch(version, asked, max_wait_ms=1)) == [ErrorCode.REPLICA_NOT_AVAILABLE]


async def test_a_new_leader_whose_log_ends_below_the_offset_releases_nothing(bench: Bench) -> None:
    """Known bounds of an older epoch do not count: the answer might mean "beyond the end"."""
    await bench.fetch(13, ask(13, 0))
    log = bench.cluster.logs[P0]
    log.leader_epoch, log.log_start_offset, log.batches = 6, 0, bench.batches[:5]
    response = await bench.fetch(13, ask(13, 60, leader_epoch=6), max_wait_ms=60_000)
    assert codes(response) == [1]


async def test_a_recreated_topic_is_not_served_from_its_predecessors_tier(bench: Bench) -> None:
    await bench.fetch(12, ask(12, 0))
    fresh_id = uuid.UUID(int=1234)
    bench.cluster.topics["orders"] = fresh_id
    bench.cluster.logs[TopicIdPartition(fresh_id, 0)] = LocalLog([batch_of(0, 5)])
    assert codes(await bench.fetch(12, ask(12, 50))) == [1]


async def test_zstd_is_refused_to_clients_that_cannot_read_it(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench:
        await bench.tier.add(P1, [batch_of(0, BATCH, codec=4)], 0)
        bench.cluster.logs[P1] = LocalLog([batch_of(10, BATCH)], 10)
        assert codes(await bench.fetch(9, ask(9, 0, partition=1))) == [ErrorCode.UNSUPPORTED_COMPRESSION_TYPE]
        assert codes(await bench.fetch(10, ask(10, 0, partition=1))) == [0]


async def test_a_diverging_last_fetched_epoch_is_answered_as_by_the_broker(bench: Bench) -> None:
    await bench.tier.add(P1, [batch_of(0, 10, leader_epoch=1)], 0)
    await bench.tier.add(P1, [batch_of(10, 10, leader_epoch=4)], 10)
    bench.cluster.logs[P1] = LocalLog([batch_of(20, BATCH)], 20)
    good = await bench.fetch(13, ask(13, 5, partition=1, last_fetched_epoch=1))
    assert good.diverging_epoch(good.partitions[0]) is None
    assert records(good)
    for epoch, end in ((2, (1, 10)), (1, (1, 10))):
        response = await bench.fetch(13, ask(13, 12, partition=1, last_fetched_epoch=epoch))
        assert response.diverging_epoch(response.partitions[0]) == end
        assert (codes(response), records(response)) == ([0], b"")
    newest = bench.cluster.logs[P1].leader_epoch
    for epoch, code in ((newest, 0), (newest + 1, ErrorCode.OFFSET_OUT_OF_RANGE)):
        assert codes(await bench.fetch(13, ask(13, 5, partition=1, last_fetched_epoch=epoch))) == [code]


@pytest.mark.parametrize("last_fetched_epoch", [-1, 5])
async def test_bounds_from_before_a_trim_do_not_explain_a_refusal(bench: Bench, last_fetched_epoch: int) -> None:
    """A consumer must not get OFFSET_OUT_OF_RANGE because of bounds that another request asked for earlier."""
    log = bench.cluster.logs[P0]
    log.log_start_offset, trimmed = 60, log.log_start_offset
    exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 60, last_fetched_epoch=last_fetched_epoch)]))
    action, respond = bench.handler.on_request(exchange)
    assert codes(await bench.fetch(13, ask(13, 50), connection_id=2)) == [0]
    log.log_start_offset = trimmed
    assert isinstance(action, Forward)
    assert respond is not None
    answer = respond(memoryview(bench.cluster.answer(action.frame)))
    assert isinstance(answer, Coroutine)
    response = parse(13, await answer)
    assert codes(response) == [0]
    assert records(response).startswith(bench.batches[6])


@pytest.mark.parametrize(
    ("leader_epoch", "code", "wait_ms"),
    [(5, ErrorCode.OFFSET_OUT_OF_RANGE, 60_000), (6, ErrorCode.REPLICA_NOT_AVAILABLE, 10)],
)
async def test_a_new_leader_that_begins_lower_does_not_explain_an_old_refusal(
    tmp_path: Path, leader_epoch: int, code: int, wait_ms: int
) -> None:
    """The log start of one leader never falls. So it refused the epoch, and not the offset."""
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=wait_ms))) as bench:
        log = bench.cluster.logs[P0]
        frame = fetch_frame(13, [ask(13, 60, leader_epoch=5, last_fetched_epoch=5)], max_wait_ms=1)
        action, respond = bench.handler.on_request(FakeExchange(bench.cluster, frame))
        assert isinstance(action, Forward)
        assert respond is not None
        refusal = bench.cluster.answer(action.frame)
        log.leader_epoch, log.log_start_offset = leader_epoch, 0
        answer = respond(memoryview(refusal))
        assert isinstance(answer, Coroutine)
        assert codes(parse(13, await answer)) == [code]


@pytest.mark.parametrize(("version", "replica_id"), [(4, 2), (14, -3), (15, 2), (15, 1 << 24)])
async def test_followers_get_what_the_broker_says(bench: Bench, version: int, replica_id: int) -> None:
    await bench.fetch(13, ask(13, 0))
    frame = fetch_frame(version, [ask(version, 0)], replica_id=replica_id)
    action, respond = bench.handler.on_request(FakeExchange(bench.cluster, frame))
    assert isinstance(action, Forward)
    assert (action.frame, action.hold_bytes, action.patcher, respond) == (frame, 0, None, None)


async def test_metadata_that_is_not_open_costs_no_connection(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is being rebuilt: local records are served, and trimmed offsets are retried."""
    await bench.fetch(13, ask(13, 0))

    def not_ready(*_: object) -> None:
        raise RemoteLogMetadataNotReadyError("not open")

    for name in ("log_start_offset", "is_tiered", "remote_log_segment_metadata", "next_segment", "remote_end_offset"):
        monkeypatch.setattr(bench.tier.state, name, not_ready)
    response = await bench.fetch(13, ask(13, 0), ask(13, 0, partition=1), max_wait_ms=1)
    assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]
    assert records(response, 1)


async def test_a_version_that_was_never_advertised_ends_the_connection(bench: Bench) -> None:
    frame = bytearray(fetch_frame(4, [ask(4, 0)]))
    frame[3] = 3
    with pytest.raises(ProtocolError):
        bench.handler.on_request(FakeExchange(bench.cluster, bytes(frame)))


async def test_a_large_answer_streams_and_its_remote_partition_comes_next(tmp_path: Path) -> None:
    async with bench_of(
        tmp_path, FetchSettings(hold_bytes=500, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    ) as bench:
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 1, value_bytes=3000)])
        for version in VERSIONS:
            response = await bench.fetch(
                version, ask(version, 20), ask_local(version, 0), session_epoch=0, connection_id=version
            )
            assert bench.streamed
            assert codes(response) == [0, 0]
            assert records(response, 0) == b""
            assert records(response, 1) == bench.cluster.logs[LOCAL_0].batches[0]
            assert response.partitions[0].high_watermark > 20
            if version >= 7:
                refused = await bench.fetch(version, session_id=77, session_epoch=1, connection_id=version)
                assert refused.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            sent = len(bench.cluster.requests)
            response = await bench.until_remote(
                version, ask(version, 20), ask_local(version, 0), session_epoch=0, connection_id=version
            )
            assert records(response, 0).startswith(bench.batches[2])
            assert records(response, 1)
            if version >= 7:
                assert bench.cluster.requests[sent].session_id == 77


async def test_the_remote_tier_leaves_room_for_local_partitions(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    size = len(bench.batches[0])
    await bench.fetch(13, ask(13, 0, max_bytes=size), ask_local(13, 0), max_bytes=3 * size)
    assert bench.cluster.requests[-1].max_bytes == 2 * size


async def test_a_long_backfill_tells_a_young_high_watermark(tmp_path: Path) -> None:
    """The bounds of the local log need no new question while the leader epoch is the same."""
    settings = FetchSettings(watermarks_max_age_ms=0, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    async with bench_of(tmp_path, settings) as bench, asyncio.timeout(60):
        asked = ask(13, 0, leader_epoch=5)
        response = await bench.fetch(13, asked)
        assert response.partitions[0].high_watermark == 200
        bench.cluster.logs[P0].batches.append(batch_of(200, BATCH))
        while response.partitions[0].high_watermark == 200:
            response = await bench.fetch(13, asked)
            assert records(response).startswith(bench.batches[0])
        assert response.partitions[0].high_watermark == 210


@pytest.mark.parametrize("hold_bytes", [0, 100_000])
@pytest.mark.parametrize("error", [ErrorCode.NONE, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
async def test_a_topic_is_used_only_when_the_broker_answers_for_it(
    tmp_path: Path, hold_bytes: int, error: ErrorCode
) -> None:
    async with bench_of(tmp_path, FetchSettings(hold_bytes=hold_bytes)) as bench:
        bench.cluster.logs[LOCAL_0].error_code = error
        assert codes(await bench.fetch(12, ask_local(12, 0))) == [error]
        assert bench.streamed == (hold_bytes == 0)
        assert bench.cluster.used == (set() if error else {"local"})
