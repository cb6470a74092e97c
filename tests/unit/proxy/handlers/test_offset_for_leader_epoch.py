"""Epochs that the broker forgot are answered from the remote tier; everything else is the broker's.

See docs/semantics.md 6.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.api_keys import ApiKey
from protocol.apis.offset_for_leader_epoch import (
    EpochPartition,
    OffsetForLeaderEpochRequest,
    parse_offset_for_leader_epoch_response,
)
from protocol.header import build_request_header, build_response_header, response_body_position
from protocol.primitives import INT16, INT32, INT64, write_array_length, write_string
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.handlers import offset_for_leader_epoch, turns
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.leader_epochs import contains, end_offset_for
from proxy.handlers.offset_for_leader_epoch import OffsetForLeaderEpochHandler
from proxy.wire.exchange import Forward, Respond
from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.proxy.never_fresh import NeverFresh
from tiers.broker.client import monotonic_ms
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.reader.remote_log_reader import RemoteLogReader

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
VERSIONS = (2, 3, 4)


def head_of(version: int) -> bytes:
    compact = version >= 4
    return write_array_length(1, compact) + write_string("orders", compact) + write_array_length(1, compact)


def tags_of(version: int) -> bytes:
    """The tagged fields of the partition, the topic and the message, all empty."""
    return b"\x00" * 3 if version >= 4 else b""


class Bench:
    def __init__(self, tier: RemoteTier, cluster: FakeCluster, tools: HandlerTools) -> None:
        self.tier = tier
        self.cluster = cluster
        self.handler = OffsetForLeaderEpochHandler(tools)

    def send(self, version: int, epoch: int, replica_id: int = -1) -> Respond | None:
        frame = build_request_header(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, 9, "test")
        frame += (INT32.pack(replica_id) if version >= 3 else b"") + head_of(version)
        frame += INT32.pack(0) + INT32.pack(-1) + INT32.pack(epoch) + tags_of(version)
        action, respond = self.handler.on_request(FakeExchange(self.cluster, frame))
        assert isinstance(action, Forward)
        assert action.frame == frame
        return respond

    async def ask(self, version: int, epoch: int, broker: tuple[int, int], error_code: int = 0) -> tuple[int, int, int]:
        head, tags = head_of(version), tags_of(version)
        respond = self.send(version, epoch)
        assert respond is not None
        payload = build_response_header(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, 9) + INT32.pack(0) + head
        payload += INT16.pack(error_code) + INT32.pack(0) + INT32.pack(broker[0]) + INT64.pack(broker[1]) + tags
        answer = respond(memoryview(payload))
        assert asyncio.iscoroutine(answer)
        payload = b"".join(await answer)
        body_position = response_body_position(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, payload)
        (one,) = parse_offset_for_leader_epoch_response(payload, body_position, version).partitions
        return one.error_code, one.leader_epoch, one.end_offset


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Remote: epoch 1 from 0, 3 from 10, 6 from 20 to 29. The broker starts at 30, in epoch 8."""
    tier = RemoteTier(tmp_path)
    await tier.add(P0, [batch_of(0, 10, leader_epoch=1), batch_of(10, 10, leader_epoch=3)], 0)
    await tier.add(P0, [batch_of(20, 10, leader_epoch=6)], 20)
    cluster = FakeCluster(topics={"orders": TOPIC_ID}, logs={P0: LocalLog([batch_of(30, 10)], 30)})
    settings = FetchSettings()
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader, asyncio.TaskGroup() as group:
        bounds = LocalLogBoundsCache(cluster, monotonic_ms)
        yield Bench(
            tier,
            cluster,
            HandlerTools(cluster, tier.rlmm.log, bounds, cluster, reader, settings, monotonic_ms, group.create_task),
        )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("asked", "expected"), [(0, (0, 0)), (1, (1, 10)), (2, (1, 10)), (3, (3, 20)), (5, (3, 20))])
async def test_an_epoch_older_than_the_last_remote_one(
    bench: Bench, version: int, asked: int, expected: tuple[int, int]
) -> None:
    assert await bench.ask(version, asked, (asked, 30)) == (0, *expected)


async def test_partitions_that_wait_in_vain_do_not_add_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLICE_ITEMS", 1)
    monkeypatch.setattr(offset_for_leader_epoch, "_TIMEOUT_MS", 1)
    never_fresh = NeverFresh()
    monkeypatch.setattr(bench.handler._tools.log, "ensure_fresh", never_fresh)
    count = 100
    request = OffsetForLeaderEpochRequest(3, -1, [EpochPartition("orders", each, -1, 0) for each in range(count)])
    payload = build_response_header(ApiKey.OFFSET_FOR_LEADER_EPOCH, 3, 9) + INT32.pack(0)
    payload += write_array_length(1, False) + write_string("orders", False) + write_array_length(count, False)
    for each in range(count):
        payload += INT16.pack(0) + INT32.pack(each) + INT32.pack(0) + INT64.pack(30)
    answer = memoryview(payload)
    exchange = FakeExchange(bench.cluster, build_request_header(ApiKey.OFFSET_FOR_LEADER_EPOCH, 3, 9, "test"))
    assert await bench.handler.complete(exchange, request, answer) == (answer,)
    assert never_fresh.looks < count


@pytest.mark.parametrize("version", VERSIONS)
async def test_from_the_last_remote_epoch_on_the_broker_knows(bench: Bench, version: int) -> None:
    assert await bench.ask(version, 6, (6, 33)) == (0, 6, 33)
    assert await bench.ask(version, 8, (8, 40)) == (0, 8, 40)
    assert await bench.ask(version, 9, (-1, -1)) == (0, -1, -1)
    # Newer than all remote ones, older than all local ones: it wrote nothing.
    assert await bench.ask(version, 7, (7, 30)) == (0, 6, 30)
    assert await bench.ask(version, 1, (-1, -1), error_code=74) == (74, -1, -1)


@pytest.mark.parametrize("version", VERSIONS)
async def test_between_the_tiers_what_wrote_lost_records_ends_with_the_gap(bench: Bench, version: int) -> None:
    """The broker says so already."""
    await bench.tier.rlmm.put_log_gap(P0, LogGap(30, 50), 8)
    bench.cluster.logs[P0].log_start_offset = 50
    for epoch in (6, 7):
        assert await bench.ask(version, epoch, (epoch, 50)) == (0, epoch, 50)
    assert await bench.ask(version, 4, (4, 50)) == (0, 3, 20)


@pytest.mark.parametrize("version", VERSIONS)
async def test_inside_the_remote_tier_what_wrote_lost_records_ends_with_the_gap(bench: Bench, version: int) -> None:
    await bench.tier.rlmm.put_log_gap(P0, LogGap(30, 40), 8)
    await bench.tier.add(P0, [batch_of(40, 10, leader_epoch=8)], 40)
    bench.cluster.logs[P0] = LocalLog([batch_of(50, 10)], 50, leader_epoch=9)
    for epoch in (6, 7):
        assert await bench.ask(version, epoch, (epoch, 50)) == (0, epoch, 40)
    assert await bench.ask(version, 5, (5, 50)) == (0, 3, 20)
    assert await bench.ask(version, 8, (8, 50)) == (0, 8, 50)


@pytest.mark.parametrize("version", [3, 4])
async def test_the_broker_answers_followers_and_debug_consumers_are_consumers(bench: Bench, version: int) -> None:
    assert bench.send(version, 1, replica_id=2) is None
    assert bench.send(version, 1, replica_id=-2) is not None


async def test_without_the_remote_epochs_the_brokers_answer_is_safe(bench: Bench) -> None:
    bench.tier.rlmm.fresh = False
    assert await bench.ask(4, 1, (1, 30)) == (0, 1, 30)


@given(
    epochs=st.dictionaries(st.integers(0, 20), st.just(0), min_size=1, max_size=6).map(sorted),
    steps=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    asked=st.integers(0, 22),
)
def test_the_end_of_an_epoch_is_where_the_next_known_one_begins(
    epochs: list[int], steps: list[int], asked: int
) -> None:
    entries = [LeaderEpochEntry(epoch, sum(steps[: n + 1])) for n, epoch in enumerate(epochs)]
    found = end_offset_for(entries, asked)
    assert contains(entries, asked) == (asked in epochs)
    if asked >= epochs[-1]:
        assert found is None
        return
    assert found is not None
    higher = next(entry for entry in entries if entry.epoch > asked)
    assert found.end_offset == higher.start_offset
    assert found.epoch == max((epoch for epoch in epochs if epoch <= asked), default=asked)


@pytest.mark.parametrize(
    ("asked", "gap", "expected"),
    [
        (5, LogGap(20, 30), (5, 30)),
        (3, LogGap(20, 30), (3, 30)),
        (5, LogGap(20, 40), (5, 40)),  # the batch that holds the gap's end begins before it
        (5, LogGap(12, 20), (3, 30)),  # followed by epoch 3 again
        (5, LogGap(31, 40), (3, 30)),
        (2, LogGap(20, 30), (1, 10)),
        (0, LogGap(0, 9), (0, 9)),  # at the head
        (7, LogGap(20, 30), None),
    ],
)
def test_an_epoch_between_a_gaps_neighbours_ends_with_it(
    asked: int, gap: LogGap, expected: tuple[int, int] | None
) -> None:
    epochs = [LeaderEpochEntry(1, 0), LeaderEpochEntry(3, 10), LeaderEpochEntry(7, 30)]
    assert end_offset_for(epochs, asked, [gap, LogGap(90, 95)]) == expected


async def test_a_partition_that_is_named_twice_is_left_to_the_broker(bench: Bench) -> None:
    """It answers twice; for epoch 3 alone the remote tier would know better."""
    head = write_array_length(1, False) + write_string("orders", False) + write_array_length(2, False)
    frame = build_request_header(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 9, "test") + head
    frame += b"".join(INT32.pack(0) + INT32.pack(-1) + INT32.pack(epoch) for epoch in (1, 3))
    payload = build_response_header(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 9) + INT32.pack(0) + head
    payload += b"".join(INT16.pack(0) + INT32.pack(0) + INT32.pack(epoch) + INT64.pack(30) for epoch in (1, 3))
    _, respond = bench.handler.on_request(FakeExchange(bench.cluster, frame))
    assert respond is not None
    answer = respond(memoryview(payload))
    assert asyncio.iscoroutine(answer)
    assert b"".join(await answer) == payload
