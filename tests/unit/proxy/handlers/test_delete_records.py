"""DeleteRecords: an answer without an error means that nothing deleted can reappear (docs/semantics.md 9.1)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.delete_records import (
    HIGH_WATERMARK,
    DeleteRecordsAnswer,
    parse_delete_records_request,
    parse_delete_records_response,
)
from protocol.errors import ErrorCode
from protocol.header import (
    build_request_header,
    build_response_header,
    parse_request_header,
    response_body_position,
)
from protocol.primitives import INT16, INT32, INT64, write_array_length, write_string
from proxy.cluster.configured_topics import ConfiguredTopics, NothingConfigured
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.delete_records import DeleteRecordsHandler
from proxy.handlers.turns import SLICE_ITEMS
from proxy.wire.exchange import Forward, Prepare, Respond
from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.configured_topics import configured_topics
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.proxy.turn_counter import counted_turns
from tiers.broker.client import monotonic_ms
from tiers.config.topic_policy import TopicConfig
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason, OffsetAndEpoch
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.tasks.history.align import require_aligned

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
P1 = TopicIdPartition(TOPIC_ID, 1, "orders")
VERSIONS = (0, 1, 2)


class SlowManager(RemoteLogMetadataManager):
    """The write of a log start waits until `gate` opens."""

    def __init__(self, log: MetadataLog) -> None:
        super().__init__(log)
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.done = asyncio.Event()
        self.timeouts_ms: list[int | None] = []

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeouts_ms.append(timeout_ms)
        self.asked.set()
        await self.gate.wait()
        await super().put_log_start(partition, start)
        self.done.set()


class Bench:
    def __init__(self, tier: RemoteTier, cluster: FakeCluster, tools: HandlerTools) -> None:
        self.tier = tier
        self.cluster = cluster
        self.bounds = tools.bounds
        self.recorder = SlowManager(tier.rlmm.log)
        self.recorder.gate.set()
        self.forwarded_offset = 0
        """What the broker was asked last to delete up to."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Happens while the broker deletes."""
        self._tools = tools
        self.handler = self.handler_with(tools.configured)

    def handler_with(self, configured: ConfiguredTopics | NothingConfigured) -> DeleteRecordsHandler:
        check_history = partial(require_aligned, self.cluster, self.tier.state)
        return DeleteRecordsHandler(replace(self._tools, configured=configured), self.recorder, check_history)

    async def delete(
        self,
        version: int,
        offset: int,
        low_watermark: int,
        error_code: int = 0,
        topic: str = "orders",
        timeout_ms: int = 1000,
        partition: int = 0,
        is_allowed: bool = False,
    ) -> tuple[int, int]:
        """`(error code, low watermark)`; the given ones are the broker's answer.

        `is_allowed`: the broker has the error only for the deletion, and not for the client's rights."""
        compact = version >= 2
        tags = b"\x00" if compact else b""
        head = write_array_length(1, compact) + write_string(topic, compact) + write_array_length(1, compact)
        frame = build_request_header(ApiKey.DELETE_RECORDS, version, 9, "test") + head
        frame += INT32.pack(partition) + INT64.pack(offset) + tags * 2 + INT32.pack(timeout_ms) + tags

        def answered(low_watermark: int, error_code: int) -> bytes:
            payload = build_response_header(ApiKey.DELETE_RECORDS, version, 9) + INT32.pack(0) + head
            return payload + INT32.pack(partition) + INT64.pack(low_watermark) + INT16.pack(error_code) + tags * 3

        def asked_first(frame: bytes) -> bytes:
            """The broker answers for the client's rights, and then for an offset that it never accepts."""
            body_position = parse_request_header(frame).body_position
            (one,) = parse_delete_records_request(frame, body_position, version).partitions
            assert one.offset < HIGH_WATERMARK
            return answered(-1, ErrorCode.OFFSET_OUT_OF_RANGE if is_allowed or not error_code else error_code)

        action, respond = self.handler.on_request(FakeExchange(self.cluster, frame, answer=asked_first))
        assert isinstance(action, Prepare)
        forwarded = await action.decide()
        assert isinstance(forwarded, Forward)
        body_position = parse_request_header(forwarded.frame).body_position
        (sent,) = parse_delete_records_request(forwarded.frame, body_position, version).partitions
        assert (sent.topic, sent.partition) == (topic, partition)
        self.forwarded_offset = sent.offset
        self.meanwhile()
        assert respond is not None
        answer = respond(memoryview(answered(low_watermark, error_code)))
        assert asyncio.iscoroutine(answer)
        payload = b"".join(await answer)
        body_position = response_body_position(ApiKey.DELETE_RECORDS, version, payload)
        (one,) = parse_delete_records_response(payload, body_position, version).partitions
        return one.error_code, one.low_watermark


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Remote 0 to 29; the broker starts at 30."""
    tier = RemoteTier(tmp_path)
    await tier.add(P0, [batch_of(0, 30)], 0)
    cluster = FakeCluster(topics={"orders": TOPIC_ID, "plain": uuid.UUID(int=3)})
    cluster.logs[P0] = LocalLog([], log_start_offset=30)
    settings = FetchSettings(metadata_timeout_ms=50)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader, asyncio.TaskGroup() as group:
        bounds = LocalLogBoundsCache(cluster, monotonic_ms)
        yield Bench(
            tier,
            cluster,
            HandlerTools(cluster, tier.rlmm.log, bounds, cluster, reader, settings, monotonic_ms, group.create_task),
        )


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_tiers_log_start_is_raised_before_the_answer(bench: Bench, version: int) -> None:
    assert await bench.delete(version, 12, 30) == (0, 12)
    assert bench.tier.state.log_start_offset(P0) == 12
    assert await bench.delete(version, 5, 30) == (0, 12)
    assert bench.tier.state.log_start_offset(P0) == 12
    bench.cluster.logs[P0].log_start_offset = 41
    assert await bench.delete(version, 41, 41) == (0, 41)
    assert bench.tier.state.log_start_offset(P0) == 41


@pytest.mark.parametrize("version", VERSIONS)
async def test_minus_one_deletes_up_to_what_the_broker_says(bench: Bench, version: int) -> None:
    bench.cluster.logs[P0].log_start_offset = 55
    assert await bench.delete(version, -1, 55) == (0, 55)
    assert bench.tier.state.log_start_offset(P0) == 55


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_allowed", [False, True])
async def test_a_refusal_of_the_broker_changes_nothing(bench: Bench, version: int, is_allowed: bool) -> None:
    """The broker refuses the client, or has another leader when it shall delete."""
    code = ErrorCode.NOT_LEADER_OR_FOLLOWER if is_allowed else ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert await bench.delete(version, 12, -1, error_code=code, is_allowed=is_allowed) == (code, -1)
    assert bench.tier.state.log_start_offset(P0) == 0


@pytest.mark.parametrize("topic", ["orders", "missing"])
async def test_the_leader_is_asked_when_the_broker_has_allowed_the_client(
    bench: Bench, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def note(*arguments: object) -> dict[str, uuid.UUID]:
        asked.append(arguments)
        return {}

    monkeypatch.setattr(bench.cluster, "current_topic_ids", note)
    code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert await bench.delete(1, 40, -1, error_code=code, topic=topic) == (code, -1)
    assert bench.forwarded_offset < HIGH_WATERMARK
    assert asked == []
    await bench.delete(1, 40, 40, topic=topic)
    assert asked


async def test_a_log_start_that_cannot_be_recorded_is_an_error_to_try_again(bench: Bench) -> None:
    bench.tier.rlmm.fail_writes = RemoteLogMetadataError("no quorum")
    assert await bench.delete(2, 12, 30) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    bench.tier.rlmm.fail_writes = None
    bench.tier.rlmm.fresh = False
    assert await bench.delete(2, 12, 30) == (ErrorCode.REQUEST_TIMED_OUT, -1)


@pytest.mark.parametrize(
    ("patience_ms", "at_least", "at_most"), [(0, 1, 5_000), (45_000, 30_000, 45_000), (3_600_000, 30_000, 60_000)]
)
async def test_a_log_start_may_take_as_long_as_the_client_waits_up_to_a_minute(
    bench: Bench, patience_ms: int, at_least: int, at_most: int
) -> None:
    assert await bench.delete(2, 12, 30, timeout_ms=patience_ms) == (0, 12)
    (timeout_ms,) = bench.recorder.timeouts_ms
    assert timeout_ms is not None
    assert at_least <= timeout_ms <= at_most


async def test_a_log_that_does_not_begin_where_the_broker_said_is_another_topics(bench: Bench) -> None:
    """A replica of the old topic answered, and the name has another id by now: that one loses nothing."""
    bench.meanwhile = lambda: setattr(bench.cluster.logs[P0], "log_start_offset", 0)
    assert await bench.delete(2, 12, 30) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    assert bench.tier.state.log_start_offset(P0) == 0
    bench.meanwhile = lambda: bench.cluster.topics.pop("orders")
    bench.cluster.logs[P0].log_start_offset = 30
    assert await bench.delete(2, 12, 30) == (ErrorCode.REQUEST_TIMED_OUT, -1)


async def test_a_log_start_of_another_history_does_not_stand_in_for_a_deletion(bench: Bench) -> None:
    """500 was deleted of a log that is gone; the one that took its place has less than that.

    The owner ends the former log start."""
    before = user_log_start(500, leader_epoch=1)
    await bench.tier.rlmm.put_log_start(P0, before)
    assert await bench.delete(2, 12, 30) == (0, 12)
    assert bench.tier.state.log_starts(P0) == [before, user_log_start(12, last_epoch=0)]
    assert bench.cluster.epochs_asked == [(P0, 1), (P0, 0)]


async def test_a_log_start_is_recorded_once_in_each_leader_epoch(bench: Bench) -> None:
    before, present = user_log_start(12, leader_epoch=1), user_log_start(12, last_epoch=0)
    await bench.tier.rlmm.put_log_start(P0, before)
    for offset in (12, 12, 7):
        assert await bench.delete(2, offset, 30) == (0, 12)
        assert bench.tier.state.log_starts(P0) == [present, before]


async def test_the_log_start_has_the_epoch_of_the_leader_that_confirmed_it(bench: Bench) -> None:
    await bench.bounds.ask(P0, 0, 1000)
    bench.cluster.logs[P0].leader_epoch = 6
    assert await bench.delete(2, 12, 30) == (0, 12)
    assert bench.tier.state.log_starts(P0) == [user_log_start(12, leader_epoch=6, last_epoch=0)]


async def test_the_log_start_names_the_epoch_of_the_last_deleted_record(bench: Bench) -> None:
    """Epoch 0 is remote. The leader's log has epoch 3 up to 49, and its own epoch 5 from 50 on."""
    log = bench.cluster.logs[P0] = LocalLog([batch_of(30, 30)], log_start_offset=30, epochs=((3, 30), (5, 50)))
    for offset, last_epoch in ((29, 0), (50, 3), (51, 5)):
        bench.meanwhile = partial(setattr, log, "log_start_offset", max(30, offset))
        assert await bench.delete(2, offset, max(30, offset)) == (0, offset)
        assert bench.tier.state.log_starts(P0)[0] == user_log_start(offset, last_epoch=last_epoch)


async def test_a_leader_that_comes_during_the_deletion_leaves_the_epoch_unknown(bench: Bench) -> None:
    log = bench.cluster.logs[P0] = LocalLog([batch_of(30, 30)], log_start_offset=30, epochs=((3, 30), (5, 50)))

    def elect_and_delete() -> None:
        log.leader_epoch, log.log_start_offset = 6, 45

    bench.meanwhile = elect_and_delete
    assert await bench.delete(2, 45, 45) == (0, 45)
    assert bench.tier.state.log_starts(P0) == [user_log_start(45, leader_epoch=6)]


async def test_a_log_start_that_moves_during_the_question_names_no_wrong_epoch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader forgets the epochs below its log start, and a copy in progress brings the record back in its epoch."""
    log = bench.cluster.logs[P0] = LocalLog([batch_of(30, 30)], log_start_offset=30, epochs=((3, 30), (5, 50)))
    answer = bench.cluster.end_offset_for_epoch

    async def answer_after_retention(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        if leader_epoch == log.leader_epoch - 1:
            log.log_start_offset, log.epochs = 60, ((5, 60),)
        return await answer(partition, leader_epoch, timeout_ms)

    monkeypatch.setattr(bench.cluster, "end_offset_for_epoch", answer_after_retention)
    assert await bench.delete(2, 45, 60) == (0, 60)
    await bench.tier.add(P0, [batch_of(30, 20, leader_epoch=3), batch_of(50, 10, leader_epoch=5)], 3)
    assert bench.tier.state.log_starts(P0) == [user_log_start(45)]


@pytest.mark.parametrize(("leader_since", "last_epoch"), [(59, 5), (60, UNKNOWN_EPOCH)])
async def test_records_that_come_during_the_deletion_are_of_the_leaders_epoch(
    bench: Bench, leader_since: int, last_epoch: int
) -> None:
    """A deletion up to the high watermark also deletes the records that come after the question.

    They have the leader's epoch for sure only if the record before them has it."""
    epochs = ((3, 30), (5, leader_since))
    log = bench.cluster.logs[P0] = LocalLog([batch_of(30, 30)], log_start_offset=30, epochs=epochs)
    bench.meanwhile = partial(setattr, log, "log_start_offset", 75)
    assert await bench.delete(2, HIGH_WATERMARK, 75) == (0, 75)
    assert bench.tier.state.log_starts(P0) == [user_log_start(75, last_epoch=last_epoch)]


async def test_the_epoch_of_a_topic_that_was_recreated_meanwhile_is_not_taken(bench: Bench) -> None:
    bench.cluster.logs[P0] = LocalLog([batch_of(30, 30)], log_start_offset=30, epochs=((3, 30), (5, 50)))
    anew = TopicIdPartition(uuid.UUID(int=9), 0, "orders")
    await bench.tier.rlmm.put_log_start(anew, LogStart(0, 5, LogStartReason.SEEN))

    def recreate() -> None:
        bench.cluster.topics["orders"] = anew.topic_id
        bench.cluster.logs[anew] = LocalLog([batch_of(45, 30)], log_start_offset=45)

    bench.meanwhile = recreate
    assert await bench.delete(2, 45, 45) == (0, 45)
    assert bench.tier.state.log_starts(anew) == [user_log_start(45)]


async def test_a_deletion_ahead_of_the_first_copy_is_recorded(bench: Bench) -> None:
    """A copy in progress must not bring deleted records back."""
    await bench.tier.rlmm.put_log_start(P1, LogStart(0, 5, LogStartReason.SEEN))
    bench.cluster.logs[P1] = LocalLog([], log_start_offset=7)
    assert await bench.delete(2, 7, 7, partition=1) == (0, 7)
    assert bench.tier.state.log_starts(P1) == [user_log_start(7)]


async def test_a_topic_that_is_not_tiered_is_the_brokers(bench: Bench) -> None:
    assert await bench.delete(2, 12, 12, topic="plain") == (0, 12)
    assert bench.tier.rlmm.written == 2


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("offset", [20, 700, -1])
async def test_nothing_is_deleted_of_a_log_that_does_not_continue_the_copy(
    bench: Bench, version: int, offset: int
) -> None:
    """The broker was emptied: its log begins anew, with records of a later leader epoch at the copied offsets."""
    await bench.tier.rlmm.put_local_log_start(P0, OffsetAndEpoch(20, 0))
    bench.cluster.logs[P0] = LocalLog([batch_of(0, 10, leader_epoch=6)], leader_epoch=6)
    refused = (ErrorCode.POLICY_VIOLATION, -1)
    assert await bench.delete(version, offset, -1, error_code=ErrorCode.OFFSET_OUT_OF_RANGE) == refused
    assert bench.forwarded_offset == -2
    assert bench.tier.state.log_starts(P0) == []
    # A client without the right learns nothing, and the leader may be another broker.
    for code in (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.NOT_LEADER_OR_FOLLOWER):
        assert await bench.delete(version, offset, -1, error_code=code) == (code, -1)


async def test_until_the_owner_has_cut_the_tier_the_client_tries_again(bench: Bench) -> None:
    """An unclean election cut the end off."""
    bench.cluster.logs[P0] = LocalLog([batch_of(0, 20), batch_of(20, 5, leader_epoch=6)], 0, leader_epoch=6)
    bench.cluster.logs[P0].epochs = [(0, 0), (6, 20)]
    assert await bench.delete(2, 12, -1, error_code=1) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    assert bench.forwarded_offset == -2


async def test_without_an_answer_about_the_history_nothing_is_deleted(bench: Bench) -> None:
    bench.cluster.is_reachable = False
    assert await bench.delete(2, 12, -1, error_code=1) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    assert bench.forwarded_offset == -2
    bench.cluster.is_reachable, bench.tier.rlmm.fresh = True, False
    assert await bench.delete(2, 12, -1, error_code=1) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    assert bench.forwarded_offset == -2


async def test_nothing_is_deleted_of_a_partition_that_the_owner_has_not_seen(bench: Bench) -> None:
    """Its metadata may be lost: what is deleted of it could not be recorded."""
    topic_id = bench.cluster.topics["plain"]
    bench.handler = bench.handler_with(configured_topics(bench.tier, bench.cluster, TopicConfig(pattern="plain")))
    bench.cluster.logs[TopicIdPartition(topic_id, 0)] = log = LocalLog([batch_of(0, 20)], log_start_offset=5)
    assert await bench.delete(2, 12, -1, error_code=1, topic="plain") == (ErrorCode.REQUEST_TIMED_OUT, -1)
    assert bench.forwarded_offset == -2
    log.log_start_offset = 0
    assert await bench.delete(2, 12, 12, topic="plain") == (0, 12)


async def test_a_client_that_goes_away_leaves_the_tiers_together(bench: Bench) -> None:
    bench.recorder.gate.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        client = group.create_task(bench.delete(2, 12, 30, timeout_ms=60_000))
        await bench.recorder.asked.wait()
        client.cancel()
        await asyncio.wait([client])
        bench.recorder.gate.set()
        await bench.recorder.done.wait()
    assert bench.tier.state.log_start_offset(P0) == 12


async def large_deletion(bench: Bench, count: int) -> tuple[Respond, bytes]:
    """Prepares a request for `count` partitions. Returns what responds, and a response that deletes in all of them."""
    name = INT32.pack(1) + write_string("plain", compact=False) + INT32.pack(count)
    asked = b"".join(INT32.pack(partition) + INT64.pack(5) for partition in range(count))
    frame = build_request_header(ApiKey.DELETE_RECORDS, 0, 9, "test") + name + asked + INT32.pack(1000)

    def answered(code: int) -> bytes:
        head = build_response_header(ApiKey.DELETE_RECORDS, 0, 9) + INT32.pack(0) + name
        return head + b"".join(INT32.pack(n) + INT64.pack(5) + INT16.pack(code) for n in range(count))

    exchange = FakeExchange(bench.cluster, frame, answer=lambda _: answered(ErrorCode.OFFSET_OUT_OF_RANGE))
    action, respond = bench.handler.on_request(exchange)
    assert isinstance(action, Prepare)
    await action.decide()
    assert respond is not None
    return respond, answered(ErrorCode.NONE)


async def codes_of(respond: Respond, response: bytes) -> list[int]:
    answer = respond(memoryview(response))
    assert asyncio.iscoroutine(answer)
    payload = b"".join(await answer)
    body_position = response_body_position(ApiKey.DELETE_RECORDS, 0, payload)
    return [one.error_code for one in parse_delete_records_response(payload, body_position, 0).partitions]


@pytest.mark.parametrize("step", ["_refusal", "_answer"])
async def test_the_timeouts_of_many_partitions_do_not_add_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whether the check before the deletion hangs, or the record after it."""
    loop = asyncio.get_running_loop()
    real_s, tried, passed_s = loop.time, 0, 0.0
    monkeypatch.setattr(loop, "time", lambda: real_s() + passed_s)

    async def relay(*arguments: Any) -> None:
        return

    async def hang(*arguments: Any) -> None:
        nonlocal tried, passed_s
        tried += 1
        passed_s = 100.0  # more than any timeout of a request

    for name in ("_refusal", "_answer"):
        monkeypatch.setattr(bench.handler, name, hang if name == step else relay)
    respond, deleted = await large_deletion(bench, 3 * SLICE_ITEMS)
    codes = await codes_of(respond, deleted)
    assert tried == SLICE_ITEMS
    assert codes == [ErrorCode.NONE] * SLICE_ITEMS + [ErrorCode.REQUEST_TIMED_OUT] * (2 * SLICE_ITEMS)


async def test_many_partitions_are_deleted_in_slices_of_one_task(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task, which goes on if the client disconnects."""
    spawned: list[object] = []

    def spawn(coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        spawned.append(coroutine)
        return asyncio.get_running_loop().create_task(coroutine)

    bench.handler._tools = replace(bench.handler._tools, spawn=spawn)
    count = 3 * SLICE_ITEMS
    respond, deleted = await large_deletion(bench, count)
    async with counted_turns() as turns:

        async def counted(*arguments: Any) -> Any:
            turns.note()
            return DeleteRecordsAnswer(error_code=ErrorCode.REQUEST_TIMED_OUT)

        monkeypatch.setattr(bench.handler, "_answer", counted)
        assert await codes_of(respond, deleted) == [ErrorCode.REQUEST_TIMED_OUT] * count
    assert len(spawned) == 1
    assert sum(turns.notes.values()) == count
    assert max(turns.notes.values()) <= SLICE_ITEMS
