"""The start and the end of a log for a reader, by its leader and the metadata."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.protocol.consumer import ListOffsetsRequest

from pipeline.config import load_pipeline_config
from pipeline.source import tiered_log
from pipeline.source.options import LATEST, OptionError, Position, parse_options
from pipeline.source.read_plan import LocalRange, RemoteRange
from pipeline.source.tiered_log import DataLossError, LogBounds, TieredLog
from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker import offset_apis
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.errors import BrokerError
from tiers.log import broker_log
from tiers.log.broker_log import offsets_for_times
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, OffsetAndEpoch
from tiers.segment.segment_encryption import KeyRing

ORDERS = TopicIdPartition(TOPIC_ID, 0, "orders")


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    """Leads `orders`: offsets 30 to 99."""
    async with ScriptedBroker() as broker:
        log = LocalLog([batch_of(base, 10) for base in range(30, 100, 10)], log_start_offset=30)
        broker.logs["orders", 0] = log
        broker.topics = [TopicMetadata("orders", TOPIC_ID, {0: PartitionMetadata(0, 1, log.leader_epoch)})]
        yield broker


@asynccontextmanager
async def opened_log(broker: ScriptedBroker, file: Path | None = None, /, **options: str) -> AsyncIterator[TieredLog]:
    """The log of `orders` as a reader with these options opens it, and with the tier of this file."""
    given = {"kafka.bootstrap.servers": f"127.0.0.1:{broker.port}", **options}
    if "subscribePattern" not in given:
        given.setdefault("subscribe", "orders")
    if file is not None:
        given["config"] = str(file)
    client = BrokerClient(broker.addresses, client_id="reader")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        tier = None if file is None else load_pipeline_config(file)
        yield TieredLog(parse_options(given, is_streaming=True), client, tier, stack)


async def bounds_of(broker: ScriptedBroker, file: Path | None = None, /, **options: str) -> LogBounds:
    async with opened_log(broker, file, **options) as log:
        return (await log.bounds(await log.partitions()))[ORDERS]


def file_of_tier(tier: RemoteTier, cluster_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names a tier of that cluster, which is opened as `tier`; its segments have another cluster's name."""

    async def refresh() -> None: ...

    @asynccontextmanager
    async def opened(config: object) -> AsyncIterator[SimpleNamespace]:
        cluster = SimpleNamespace(cluster_id=cluster_id)
        yield SimpleNamespace(
            metadata=tier.rlmm,
            log=tier.rlmm.log,
            state=tier.state,
            storage=tier.storage,
            key_ring=KeyRing(),
            cluster_id="renamed",
            cluster=cluster,
            refresh=refresh,
        )

    monkeypatch.setattr(tiered_log, "open_tier", opened)
    file = folder / "tidegate.toml"
    file.write_text(
        '[upstream]\nbootstrap.servers = "localhost:1"\n[storage]\nimplementation = "local"\npath = "/no"\n'
    )
    return file


async def test_the_tier_of_another_cluster_is_not_taken_for_an_empty_one(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of_tier(RemoteTier(tmp_path), "another", tmp_path, monkeypatch)
    with pytest.raises(OptionError, match=r"is the cluster cluster, and .* of the cluster another: name brokers or a"):
        await bounds_of(broker, file)


async def test_a_failed_call_does_not_hide_the_remote_tier(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RemoteTier(tmp_path)
    await tier.add(ORDERS, [batch_of(0, 30)], 0)
    file = file_of_tier(tier, broker.cluster_id, tmp_path, monkeypatch)

    async def fails(of_tier: str) -> None:
        raise BrokerError("no broker answers now", retriable=True)

    async with opened_log(broker, file) as log:
        with monkeypatch.context() as patched:
            patched.setattr(log, "_check_cluster", fails)
            with pytest.raises(BrokerError):
                await log.bounds([ORDERS])
        assert (await log.bounds([ORDERS]))[ORDERS] == LogBounds(0, 30, 100)


async def test_a_new_leaders_high_watermark_is_waited_for(broker: ScriptedBroker) -> None:
    """Records that were read from the former leader do not count as lost."""

    def lags(response: object) -> None:
        [topic] = response.responses  # type: ignore[attr-defined]  # kafka-python's
        topic.partitions[0].high_watermark = topic.partitions[0].last_stable_offset = 80

    broker.script(ApiKey.FETCH, lags)
    broker.script(ApiKey.LIST_OFFSETS, offset_apis.with_error(ErrorCode.OFFSET_NOT_AVAILABLE))
    assert await bounds_of(broker) == LogBounds(30, 30, 100)
    assert [one.isolation_level for one in broker.received(ListOffsetsRequest)] == [0, 0]
    await bounds_of(broker, **{"kafka.isolation.level": "read_committed"})
    assert broker.received(ListOffsetsRequest)[-1].isolation_level == 1


async def test_a_broker_that_leaves_a_partition_out_is_not_asked_for_ever(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(response: object) -> None:
        response.topics = []  # type: ignore[attr-defined]  # kafka-python's

    broker.script(ApiKey.LIST_OFFSETS, forgets, times=10_000)
    looks_ms = count(0, 10_000)  # of a clock that is looked at before and after each of three requests
    monkeypatch.setattr(broker_log, "monotonic_ms", lambda: next(looks_ms))
    monkeypatch.setattr(broker_log, "_OFFSETS_PAUSE_MS", 0)
    async with AsyncExitStack() as stack:
        client = BrokerClient(broker.addresses, client_id="reader")
        stack.push_async_callback(client.close)
        with pytest.raises(BrokerError, match="lacks orders-0"):
            await offsets_for_times(client, {ORDERS: LATEST}, is_committed_only=False, timeout_ms=60_000)
    assert len(broker.received(ListOffsetsRequest)) == 3


async def test_list_offsets_is_asked_again_unless_a_right_is_missing(broker: ScriptedBroker) -> None:
    broker.script(ApiKey.LIST_OFFSETS, offset_apis.with_error(ErrorCode.UNKNOWN_SERVER_ERROR))
    assert await bounds_of(broker) == LogBounds(30, 30, 100)
    broker.script(ApiKey.LIST_OFFSETS, offset_apis.with_error(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(BrokerError):
        await bounds_of(broker)


async def test_a_topic_that_is_not_there_is_named_with_the_nearest(broker: ScriptedBroker) -> None:
    with pytest.raises(OptionError, match=r"there is no topic ordrs, .* did you mean orders\?"):
        await bounds_of(broker, subscribe="ordrs")


async def test_a_topic_that_one_broker_does_not_know_yet_is_not_missing(broker: ScriptedBroker) -> None:
    def lags(response: object) -> None:
        response.topics = []  # type: ignore[attr-defined]  # kafka-python's

    for subscription, before in (({"subscribe": "orders"}, 0), ({"subscribePattern": "ord.*"}, 1)):
        async with opened_log(broker, **subscription) as log:
            for _ in range(before):
                assert await log.partitions() == [ORDERS]
            broker.script(ApiKey.METADATA, lags, times=2)  # all the brokers are this one
            assert await log.partitions() == [ORDERS]
            broker.script(ApiKey.METADATA, lags, times=3)
            if before:
                assert await log.partitions() == []
            else:
                with pytest.raises(OptionError, match="there is no topic orders"):
                    await log.partitions()


async def test_a_recorded_gap_is_passed_over_and_named(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = RemoteTier(tmp_path)
    await tier.add(ORDERS, [batch_of(0, 10)], 0)
    await tier.rlmm.put_log_gap(ORDERS, LogGap(10, 30), 0)
    file = file_of_tier(tier, broker.cluster_id, tmp_path, monkeypatch)
    async with opened_log(broker, file) as log:
        bounds = (await log.bounds(await log.partitions()))[ORDERS]
        pieces = log.ranges(ORDERS, bounds, 5, 99)
        assert [(type(one), one.first_offset, one.end_offset) for one in pieces] == [
            (RemoteRange, 5, 9),
            (LocalRange, 30, 99),
        ]
        said = [record.getMessage() for record in caplog.records if "before they were copied" in record.getMessage()]
        assert said == ["orders-0: the broker removed 10 to 29 before they were copied: a gap"]
        caplog.clear()
        log.ranges(ORDERS, bounds, 0, 9)
        assert caplog.records == []


async def test_no_time_leads_past_records_whose_metadata_is_lost(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that began in the local log would skip them."""
    tier = RemoteTier(tmp_path)
    await tier.add(ORDERS, [batch_of(0, 10, timestamp=1000)], 0)
    file = file_of_tier(tier, broker.cluster_id, tmp_path, monkeypatch)
    async with opened_log(broker, file) as log:
        bounds = await log.bounds(await log.partitions())
        early, late = (Position(at_ms, is_time=True, on_no_match="latest") for at_ms in (1000, 1 << 50))
        assert await log.offsets(early, bounds) == {ORDERS: 0}
        with pytest.raises(DataLossError, match="orders-0: the offsets 10 to 29 are in neither tier"):
            await log.offsets(late, bounds)
        await tier.add(ORDERS, [batch_of(20, 10, timestamp=2000)], 20)
        for at in (late, Position(1500, is_time=True, on_no_match="latest")):
            with pytest.raises(DataLossError, match="orders-0: the offsets 10 to 19 are in neither tier"):
                await log.offsets(at, bounds)
        assert await log.offsets(early, bounds) == {ORDERS: 0}
        await tier.rlmm.put_log_gap(ORDERS, LogGap(10, 20), 0)
        assert await log.offsets(late, bounds) == {ORDERS: 100}


async def test_no_time_leads_past_records_that_were_trimmed_meanwhile(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up of many partitions takes so long that segments are copied and trimmed during it."""
    tier = RemoteTier(tmp_path)
    await tier.add(ORDERS, [batch_of(0, 30, timestamp=1000)], 0)
    local = [batch_of(base, 10, timestamp=2000) for base in range(30, 100, 10)]
    broker.logs["orders", 0] = LocalLog(local, log_start_offset=30)
    file = file_of_tier(tier, broker.cluster_id, tmp_path, monkeypatch)
    unread = [(local[:3], 30)]

    async def trimmed_first(*arguments: Any, **options: Any) -> Mapping[TopicIdPartition, int | None]:
        broker.logs["orders", 0].log_start_offset = 60
        return await offsets_for_times(*arguments, **options)

    async def refresh() -> None:
        while unread:
            await tier.add(ORDERS, *unread.pop())

    async with opened_log(broker, file) as log:
        bounds = await log.bounds(await log.partitions())
        assert log._tier is not None
        monkeypatch.setattr(log._tier, "refresh", refresh)
        monkeypatch.setattr(tiered_log, "offsets_for_times", trimmed_first)
        at = Position(1500, is_time=True, on_no_match="error")
        assert await log.offsets(at, bounds) == {ORDERS: 30}


async def test_the_remote_tier_alone_never_goes_back(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before its first segment, and not when the last one has expired: a stream of it would miss what never was."""
    tier = RemoteTier(tmp_path)
    file = file_of_tier(tier, broker.cluster_id, tmp_path, monkeypatch)

    async def remote() -> LogBounds:
        return await bounds_of(broker, file, tier="remote")

    assert await remote() == LogBounds(30, 30, 30)
    await tier.add(ORDERS, [batch_of(30, 10), batch_of(40, 10)], 30)
    assert await remote() == LogBounds(30, 50, 50)
    await tier.rlmm.put_log_start(ORDERS, user_log_start(40))
    assert await remote() == LogBounds(40, 50, 50)
    await tier.rlmm.put_log_start(ORDERS, user_log_start(50))
    assert await remote() == LogBounds(50, 50, 50)
    for segment in list(tier.state.list_remote_log_segments(ORDERS)):
        await tier.move(segment, segment.state.DELETE_SEGMENT_STARTED)
    assert await remote() == LogBounds(50, 50, 50)


@pytest.mark.parametrize(("leader_epoch", "is_lost"), [(5, True), (4, False)])
async def test_a_trim_without_its_segments_is_a_loss_if_the_leader_knows_it(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader_epoch: int, is_lost: bool
) -> None:
    tier = RemoteTier(tmp_path)
    await tier.rlmm.put_local_log_start(ORDERS, OffsetAndEpoch(40, leader_epoch))
    file = file_of_tier(tier, broker.cluster_id, tmp_path, monkeypatch)
    if is_lost:
        with pytest.raises(DataLossError, match="not known whether the store has the records before offset 30"):
            await bounds_of(broker, file)
    kept = {"failOnDataLoss": "false"} if is_lost else {}
    assert await bounds_of(broker, file, **kept) == LogBounds(30, 30, 100)
