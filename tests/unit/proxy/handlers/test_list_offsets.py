"""ListOffsets over two tiers, at every version that has the timestamp asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from struct import Struct
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    parse_list_offsets_response,
)
from protocol.errors import CorruptBatchError, ErrorCode
from protocol.header import build_response_header, response_body_position
from protocol.primitives import INT32, write_string
from proxy.handlers import turns
from proxy.handlers.base import FetchSettings
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.configured_topics import TIERABLE, FakeConfigs
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import build_batch, record
from tests.support.fakes.remote_tier import TOPIC_ID
from tests.support.proxy.list_offsets_bench import (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST,
    LATEST_TIERED,
    MAX,
    NEXT_LOCAL,
    P0,
    PENDING,
    UNAVAILABLE,
    Bench,
    bench_of,
    found,
    request_frame,
)
from tests.support.proxy.never_fresh import NeverFresh
from tiers.config.topic_policy import TopicConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentState


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path, FetchSettings(list_offsets_timeout_ms=60_000)) as made:
        yield made


async def test_the_tier_of_a_deleted_topic_does_not_answer_for_a_new_one(bench: Bench) -> None:
    known_id = bench.cluster.topic_id
    bench.cluster.topics["orders"] = UUID(int=99)
    bench.cluster.topic_id = lambda name, max_age_ms=None: TOPIC_ID  # type: ignore[method-assign]  # what is remembered
    for asked in (EARLIEST, -5, 100):
        assert found(await bench.ask(9, asked, offset=4, timestamp=150)) == (0, 150, 4, 5)
    bench.cluster.is_reachable = False
    assert (await bench.ask(9, EARLIEST, offset=4)).error_code == ErrorCode.REPLICA_NOT_AVAILABLE
    bench.cluster.is_reachable = True
    del bench.cluster.topics["orders"]
    assert (await bench.ask(9, EARLIEST, offset=4)).error_code == ErrorCode.REPLICA_NOT_AVAILABLE
    bench.cluster.topics["orders"] = TOPIC_ID
    bench.cluster.topic_id = known_id  # type: ignore[method-assign]  # as it was
    assert (await bench.ask(9, EARLIEST, offset=4)).offset == 0


@pytest.mark.parametrize("version", [1, 6, 11])
async def test_earliest_is_the_tiers_log_start_with_its_own_epoch(bench: Bench, version: int) -> None:
    assert found(await bench.ask(version, EARLIEST, offset=4)) == (0, -1, 0, 2 if version >= 4 else -1)
    await bench.tier.rlmm.put_log_start(P0, user_log_start(3))
    assert found(await bench.ask(version, EARLIEST, offset=4)) == (0, -1, 3, 3 if version >= 4 else -1)
    await bench.tier.rlmm.put_log_start(P0, user_log_start(4))
    assert found(await bench.ask(version, EARLIEST, offset=4)) == (0, -1, 4, 5 if version >= 4 else -1)


async def test_a_log_start_above_the_brokers_hides_nothing(bench: Bench) -> None:
    """The owner deletes the records again, or ends the log start."""
    await bench.tier.rlmm.put_log_start(P0, user_log_start(5))
    assert found(await bench.ask(8, EARLIEST, offset=4)) == (0, -1, 0, 2)
    assert found(await bench.ask(8, 240, offset=5, timestamp=260)) == (0, 300, 1, 2)
    assert found(await bench.ask(11, PENDING, offset=-1, epoch=-1)) == (0, -1, 4, -1)


@pytest.mark.parametrize("offset", [3, 4, 5])
async def test_a_log_start_of_another_history_hides_nothing(bench: Bench, offset: int) -> None:
    """The tier has records of a later leader epoch below it."""
    await bench.tier.rlmm.put_log_start(P0, user_log_start(offset, leader_epoch=2))
    assert found(await bench.ask(8, EARLIEST, offset=4)) == (0, -1, 0, 2)
    assert found(await bench.ask(8, 240, offset=5, timestamp=260)) == (0, 300, 1, 2)
    assert found(await bench.ask(8, MAX, offset=5, timestamp=260)) == (0, 300, 1, 2)
    assert found(await bench.ask(9, LATEST_TIERED, offset=-1, epoch=-1)) == (0, -1, 3, 3)
    assert found(await bench.ask(11, PENDING, offset=-1, epoch=-1)) == (0, -1, 4, -1)
    assert bench.cluster.epochs_asked == []


@pytest.mark.parametrize("is_read_again", [False, True])
@pytest.mark.parametrize("asked", [EARLIEST, LATEST_TIERED, 100])
async def test_a_state_that_was_cleared_meanwhile_answers_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, asked: int, is_read_again: bool
) -> None:
    """Another process reads the state again from the start. The broker's own answer would skip records."""
    look_up = bench.tier.state.log_starts

    def cleared_before(partition: TopicIdPartition) -> list[LogStart]:
        bench.tier.rlmm.segments.clear()
        bench.tier.rlmm.fresh, bench.tier.rlmm.reading = is_read_again, 1
        return look_up(partition)

    await bench.tier.rlmm.put_log_start(P0, user_log_start(1))
    monkeypatch.setattr(bench.tier.state, "log_starts", cleared_before)
    assert (await bench.ask(9, asked, offset=4, timestamp=150)).error_code == UNAVAILABLE


@pytest.mark.parametrize(("trim", "code"), [(OffsetAndEpoch(8, 5), UNAVAILABLE), (OffsetAndEpoch(9, 4), 0)])
async def test_after_lost_metadata_the_log_start_is_not_answered(bench: Bench, trim: OffsetAndEpoch, code: int) -> None:
    """A trim, and not a segment: those were lost, if the leader confirms the trim."""
    empty = TopicIdPartition(bench.cluster.topics.setdefault("empty", UUID(int=7)), 0)
    bench.cluster.logs[empty] = LocalLog([build_batch(8, [record(8)])], 8)
    await bench.tier.rlmm.put_local_log_start(empty, trim)
    assert (await bench.ask(8, EARLIEST, offset=8, topic="empty")).error_code == code


@pytest.mark.parametrize("asked", [EARLIEST, MAX, LATEST_TIERED, PENDING, 100, 240])
async def test_a_partition_that_the_configuration_tiers_is_waited_for(tmp_path: Path, asked: int) -> None:
    """Its metadata may be lost: the broker's log start is then not where the log begins."""
    configs = FakeConfigs({"compacted": {**TIERABLE, "cleanup.policy": "compact"}})
    settings = FetchSettings(list_offsets_timeout_ms=60_000)
    async with bench_of(
        tmp_path, settings, TopicConfig(pattern="unknown"), TopicConfig(pattern="comp*"), configs=configs
    ) as bench:
        partitions = {}
        for name, number in (("unknown", 7), ("compacted", 8), ("other", 9)):
            partitions[name] = TopicIdPartition(bench.cluster.topics.setdefault(name, UUID(int=number)), 0)
            bench.cluster.logs[partitions[name]] = LocalLog([build_batch(4, [record(4, 150), record(5, 260)])], 4)
        for name, code in (("unknown", UNAVAILABLE), ("compacted", 0), ("other", 0)):
            assert (await bench.ask(11, asked, offset=4, topic=name)).error_code == code
        assert (await bench.ask(11, LATEST, offset=6, topic="unknown")).error_code == 0
        await bench.tier.rlmm.put_log_start(partitions["unknown"], LogStart(4, 5, LogStartReason.SEEN))
        assert (await bench.ask(11, asked, offset=4, topic="unknown")).error_code == 0


@pytest.mark.parametrize("asked", [EARLIEST, MAX, 100])
async def test_a_log_that_begins_at_zero_is_not_waited_for(tmp_path: Path, asked: int) -> None:
    async with bench_of(
        tmp_path,
        FetchSettings(list_offsets_timeout_ms=60_000),
        TopicConfig(pattern="unknown"),
    ) as bench:
        unknown = TopicIdPartition(bench.cluster.topics.setdefault("unknown", UUID(int=7)), 0)
        bench.cluster.logs[unknown] = LocalLog([build_batch(0, [record(0, 100)])])
        assert found(await bench.ask(9, asked, offset=0, timestamp=100, topic="unknown")) == (0, 100, 0, 5)


async def test_without_a_word_on_its_configuration_a_topic_is_waited_for(tmp_path: Path) -> None:
    configs = FakeConfigs(is_reachable=False)
    settings = FetchSettings(list_offsets_timeout_ms=60_000)
    async with bench_of(tmp_path, settings, TopicConfig(pattern="unknown"), configs=configs) as bench:
        bench.cluster.topics["unknown"] = UUID(int=7)
        assert (await bench.ask(9, EARLIEST, offset=4, topic="unknown")).error_code == UNAVAILABLE


async def test_a_gap_at_the_head_is_passed_over(bench: Bench) -> None:
    await bench.tier.rlmm.put_log_gap(P0, LogGap(4, 8), 5)
    bench.cluster.logs[P0] = LocalLog([build_batch(8, [record(8, 500)])], 8)
    assert found(await bench.ask(8, EARLIEST, offset=8)) == (0, -1, 0, 2)
    for log_start in (4, 6):
        await bench.tier.rlmm.put_log_start(P0, user_log_start(log_start))
        assert found(await bench.ask(8, EARLIEST, offset=8)) == (0, -1, 8, 5)
    await bench.tier.add(P0, [build_batch(8, [record(8, 500)], leader_epoch=5)], 8)
    bench.cluster.logs[P0] = LocalLog([build_batch(9, [record(9, 600)])], 9)
    assert found(await bench.ask(8, EARLIEST, offset=9)) == (0, -1, 8, 5)


async def test_no_timestamp_leads_past_records_whose_metadata_is_lost(bench: Bench) -> None:
    """Copies of the offsets 4 to 6 were trimmed. A client that began at offset 7 would skip them."""
    bench.cluster.logs[P0] = LocalLog([build_batch(7, [record(7, 900)])], 7)
    assert found(await bench.ask(7, 400, offset=7, timestamp=900, epoch=9))[0] == UNAVAILABLE
    assert found(await bench.ask(7, 950, offset=-1, epoch=-1))[0] == UNAVAILABLE
    assert found(await bench.ask(7, MAX, offset=7, timestamp=900))[0] == UNAVAILABLE
    assert found(await bench.ask(7, 220, offset=7, timestamp=900, epoch=9)) == (0, 300, 1, 2)
    await bench.tier.rlmm.put_log_gap(P0, LogGap(4, 7), 5)
    assert found(await bench.ask(7, 400, offset=7, timestamp=900, epoch=9)) == (0, 900, 7, 9)
    assert found(await bench.ask(7, MAX, offset=7, timestamp=900)) == (0, 900, 7, 5)


async def test_no_timestamp_leads_past_a_hole_between_two_segments(bench: Bench) -> None:
    """The metadata of the copy of the offsets 4 to 7 is lost: one of them may have the timestamp."""
    await bench.tier.add(P0, [build_batch(8, [record(8, 400)], leader_epoch=5)], 8)
    bench.cluster.logs[P0] = LocalLog([build_batch(9, [record(9, 600)], leader_epoch=5)], 9)
    for asked in (350, 450, MAX):
        assert found(await bench.ask(8, asked, offset=9, timestamp=600))[0] == UNAVAILABLE
    assert found(await bench.ask(8, 240, offset=9, timestamp=600)) == (0, 300, 1, 2)
    await bench.tier.rlmm.put_log_gap(P0, LogGap(4, 8), 5)
    assert found(await bench.ask(8, 350, offset=9, timestamp=600)) == (0, 400, 8, 5)
    assert found(await bench.ask(8, MAX, offset=9, timestamp=600)) == (0, 600, 9, 5)
    assert found(await bench.ask(8, 450, offset=9, timestamp=600)) == (0, 600, 9, 5)
    assert found(await bench.ask(9, LATEST_TIERED, offset=-1, epoch=-1)) == (0, -1, 8, 5)


@pytest.mark.parametrize("is_first_alone", [False, True])
@pytest.mark.parametrize("asked", [100, MAX])
async def test_no_timestamp_leads_past_an_attempt_before_the_first_segment(
    bench: Bench, asked: int, is_first_alone: bool
) -> None:
    segments = bench.tier.rlmm.segments
    first, second = sorted(segments.values(), key=lambda each: each.start_offset)
    segments[first.segment_id] = replace(first, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
    if is_first_alone:
        del segments[second.segment_id]
    assert found(await bench.ask(9, asked, offset=4, timestamp=260)) == (UNAVAILABLE, -1, -1, -1)


async def test_the_broker_answers_for_the_offsets_between_segments_that_it_has(bench: Bench) -> None:
    await bench.tier.add(P0, [build_batch(8, [record(8, 400)], leader_epoch=5)], 8)
    bench.cluster.logs[P0] = LocalLog([build_batch(4, [record(4, 150)]), build_batch(9, [record(9, 600)])], 4)
    assert found(await bench.ask(8, 350, offset=9, timestamp=600)) == (0, 400, 8, 5)
    assert found(await bench.ask(8, 140, offset=4, timestamp=150)) == (0, 300, 1, 2)
    assert found(await bench.ask(8, MAX, offset=9, timestamp=600)) == (0, 600, 9, 5)


@pytest.mark.parametrize("version", [1, 6, 11])
async def test_latest_and_errors_are_the_brokers(bench: Bench, version: int) -> None:
    epoch = 5 if version >= 4 else -1
    assert found(await bench.ask(version, LATEST, offset=6)) == (0, -1, 6, epoch)
    assert found(await bench.ask(version, EARLIEST_LOCAL, offset=4)) == (0, -1, 4, epoch)
    assert (await bench.ask(version, EARLIEST, offset=-1, error_code=6)).error_code == 6


async def test_the_remote_end_and_what_comes_after_it(bench: Bench) -> None:
    assert found(await bench.ask(9, LATEST_TIERED, offset=-1, epoch=-1)) == (0, -1, 3, 3)
    assert found(await bench.ask(11, PENDING, offset=-1, epoch=-1)) == (0, -1, 4, -1)


async def test_pending_upload_is_the_earliest_offset_while_nothing_was_copied(bench: Bench) -> None:
    empty = TopicIdPartition(bench.cluster.topics.setdefault("empty", TOPIC_ID.__class__(int=7)), 0)
    bench.cluster.logs[empty] = LocalLog([build_batch(8, [record(8)])], 8)
    await bench.tier.rlmm.put_log_start(empty, user_log_start(2))
    assert found(await bench.ask(11, PENDING, offset=-1, epoch=-1, topic="empty")) == (0, -1, 8, -1)
    assert found(await bench.ask(9, LATEST_TIERED, offset=-1, epoch=-1, topic="empty")) == (0, -1, -1, -1)


@pytest.mark.parametrize("version", [1, 6])
async def test_the_next_local_offset_is_behind_the_remote_end(bench: Bench, version: int) -> None:
    assert found(await bench.ask(version, NEXT_LOCAL, offset=4)) == (0, -1, 4, -1)
    assert bench.forwarded == request_frame(version, EARLIEST)
    refused = await bench.ask(version, NEXT_LOCAL, offset=-1, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    assert refused.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    bench.cluster.topics["plain"] = UUID(int=3)
    await bench.ask(version, NEXT_LOCAL, offset=-1, error_code=ErrorCode.UNSUPPORTED_VERSION, topic="plain")
    assert bench.forwarded == request_frame(version, NEXT_LOCAL, topic="plain")
    exchange = FakeExchange(bench.cluster, request_frame(version, NEXT_LOCAL, replica_id=2))
    assert bench.handler.on_request(exchange) == (Forward(exchange.request.frame), None)


async def test_the_proxy_learns_whether_an_unknown_topic_is_tiered(bench: Bench) -> None:
    """No rule of the settings file names the topic: `kafka-configs` alone tiered it."""
    assert found(await bench.ask(6, NEXT_LOCAL, offset=4, is_new=True)) == (0, -1, 4, -1)
    assert bench.forwarded == request_frame(6, EARLIEST)
    bench.cluster.topics["plain"] = UUID(int=3)
    refused = (ErrorCode.UNSUPPORTED_VERSION, -1, -1, -1)
    assert found(await bench.ask(6, NEXT_LOCAL, offset=0, topic="plain", is_new=True)) == refused


@pytest.mark.parametrize(
    ("topic", "error"),
    [("new-topic", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), ("no-topic", ErrorCode.UNSUPPORTED_VERSION)],
)
async def test_a_topic_unknown_to_proxy_and_broker_is_judged_by_its_name(
    tmp_path: Path, topic: str, error: ErrorCode
) -> None:
    """The file tiers `new-topic`, which may have been created a moment ago: the client tries again."""
    settings = FetchSettings(list_offsets_timeout_ms=60_000)
    async with bench_of(tmp_path, settings, TopicConfig(pattern="new*")) as bench:
        no_topic = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        answer = await bench.ask(6, NEXT_LOCAL, offset=-1, error_code=no_topic, topic=topic)
        assert answer.error_code == error
        assert (await bench.ask(6, EARLIEST, offset=-1, error_code=no_topic, topic=topic)).error_code == no_topic


async def test_without_segments_the_next_local_offset_is_known_at_zero_alone(tmp_path: Path) -> None:
    settings = FetchSettings(list_offsets_timeout_ms=60_000)
    configs = FakeConfigs({"compacted": {**TIERABLE, "cleanup.policy": "compact"}})
    rules = (TopicConfig(pattern="unknown*"), TopicConfig(pattern="comp*"))
    async with bench_of(tmp_path, settings, *rules, configs=configs) as bench:
        for name, number, start in (("unknown-0", 7, 0), ("unknown-4", 8, 4), ("compacted", 9, 0)):
            partition = TopicIdPartition(bench.cluster.topics.setdefault(name, UUID(int=number)), 0)
            bench.cluster.logs[partition] = LocalLog([build_batch(start, [record(start, 100)])], start)
        assert found(await bench.ask(6, NEXT_LOCAL, offset=0, topic="unknown-0")) == (0, -1, 0, -1)
        assert found(await bench.ask(11, PENDING, offset=-1, topic="unknown-0")) == (0, -1, 0, -1)
        assert (await bench.ask(6, NEXT_LOCAL, offset=4, topic="unknown-4")).error_code == UNAVAILABLE
        refused = (ErrorCode.UNSUPPORTED_VERSION, -1, -1, -1)
        assert found(await bench.ask(6, NEXT_LOCAL, offset=0, topic="compacted")) == refused


@pytest.mark.parametrize("version", [1, 6, 11])
async def test_a_timestamp_is_looked_up_remotely_first(bench: Bench, version: int) -> None:
    epoch = 2 if version >= 4 else -1
    assert found(await bench.ask(version, 240, offset=5, timestamp=260)) == (0, 300, 1, epoch)
    local = await bench.ask(version, 301, offset=-1, timestamp=-1, epoch=-1)
    assert found(local) == (0, -1, -1, -1)
    await bench.tier.rlmm.put_log_start(P0, user_log_start(2))
    assert found(await bench.ask(version, 240, offset=5, timestamp=260))[1:3] == (250, 3)
    assert found(await bench.ask(version, 255, offset=5, timestamp=260))[1:3] == (260, 5)
    assert found(await bench.ask(version, 140, offset=-1, timestamp=-1))[1:3] == (200, 2)


async def test_the_greatest_timestamp_of_both_tiers(bench: Bench) -> None:
    assert found(await bench.ask(7, MAX, offset=5, timestamp=260)) == (0, 300, 1, 2)
    assert found(await bench.ask(7, MAX, offset=5, timestamp=300)) == (0, 300, 1, 2)
    assert found(await bench.ask(7, MAX, offset=5, timestamp=301)) == (0, 301, 5, 5)
    # For example, its newest record is above the last stable offset. The same holds for the whole log.
    assert found(await bench.ask(7, MAX, offset=-1, timestamp=-1)) == (0, -1, -1, 5)


async def test_the_greatest_timestamp_is_remote_while_nothing_is_local(bench: Bench) -> None:
    bench.cluster.logs[P0] = LocalLog([], 4)
    assert found(await bench.ask(7, MAX, offset=-1, timestamp=-1)) == (0, 300, 1, 2)


@pytest.mark.parametrize("asked", [240, MAX])
async def test_a_look_up_that_fails_is_never_the_local_answer(tmp_path: Path, asked: int) -> None:
    async with bench_of(tmp_path, FetchSettings(list_offsets_timeout_ms=30)) as bench:
        bench.tier.storage.is_down = True
        assert found(await bench.ask(8, asked, offset=5, timestamp=260)) == (UNAVAILABLE, -1, -1, -1)


@pytest.mark.parametrize("asked", [EARLIEST, MAX, LATEST_TIERED, PENDING, 240])
async def test_stale_metadata_answers_nothing(bench: Bench, asked: int) -> None:
    bench.tier.rlmm.fresh = False
    assert (await bench.ask(11, asked, offset=4)).error_code == UNAVAILABLE
    assert (await bench.ask(11, LATEST, offset=6)).error_code == 0


@pytest.mark.parametrize("asked", [EARLIEST, 100])
async def test_a_broker_that_answers_offset_zero_needs_no_metadata(bench: Bench, asked: int) -> None:
    """No record lies before offset 0, whoever may have tiered the topic meanwhile."""
    bench.tier.rlmm.fresh = False
    bench.cluster.topics["plain"] = UUID(int=3)
    assert found(await bench.ask(9, asked, offset=0, timestamp=100, topic="plain")) == (0, 100, 0, 5)
    assert (await bench.ask(9, LATEST_TIERED, offset=0, topic="plain")).error_code == UNAVAILABLE
    assert (await bench.ask(9, asked, offset=0)).error_code == UNAVAILABLE, "a recorded log start may hide records"


async def test_a_topic_that_another_proxy_tiers_never_begins_too_late(bench: Bench) -> None:
    """This proxy has no rule for the topic. Another one tiers it: by its file, or because a client told it to."""
    later = TopicIdPartition(bench.cluster.topics.setdefault("later", UUID(int=3)), 0, "later")
    bench.tier.rlmm.fresh = False
    assert (await bench.ask(9, EARLIEST, offset=0, topic="later")).error_code == 0
    await bench.tier.add(later, [build_batch(0, [record(0, 100), record(1, 300)], leader_epoch=2)], 0)
    for offset in (0, 2):
        for asked in (EARLIEST, 100):
            assert (await bench.ask(9, asked, offset=offset, topic="later")).error_code == UNAVAILABLE
    bench.tier.rlmm.fresh = True
    assert found(await bench.ask(9, EARLIEST, offset=2, topic="later")) == (0, -1, 0, 2)


@pytest.mark.parametrize("asked", [EARLIEST, MAX, 100])
async def test_the_trimmed_log_of_an_unknown_topic_needs_fresh_metadata(bench: Bench, asked: int) -> None:
    bench.tier.rlmm.fresh = False
    bench.cluster.topics["plain"] = UUID(int=3)
    assert (await bench.ask(9, asked, offset=4, topic="plain")).error_code == UNAVAILABLE


@pytest.mark.parametrize("asked", [EARLIEST, MAX, LATEST_TIERED, 100])
async def test_an_internal_topic_needs_no_metadata(tmp_path: Path, asked: int) -> None:
    settings = FetchSettings(list_offsets_timeout_ms=60_000)
    async with bench_of(tmp_path, settings, TopicConfig(pattern="*")) as bench:
        bench.tier.rlmm.fresh = False
        for is_known in (False, True):
            if is_known:
                bench.cluster.topics["__consumer_offsets"] = UUID(int=3)
            answer = await bench.ask(9, asked, offset=4, timestamp=7, topic="__consumer_offsets")
            assert found(answer) == (0, 7, 4, 5)


async def test_a_topic_that_is_not_tiered_is_the_brokers(bench: Bench) -> None:
    bench.cluster.topics["plain"] = TOPIC_ID.__class__(int=3)
    for asked in (EARLIEST, MAX, LATEST_TIERED, PENDING, 5):
        assert found(await bench.ask(11, asked, offset=4, timestamp=7, topic="plain")) == (0, 7, 4, 5)


async def test_followers_are_the_brokers(bench: Bench) -> None:
    exchange = FakeExchange(bench.cluster, request_frame(8, EARLIEST, replica_id=2))
    action, state = bench.handler.on_request(exchange)
    assert state is None
    assert isinstance(action, Forward)
    assert action.hold_bytes == 0


async def test_records_that_cannot_be_read_cost_one_partition_not_the_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise CorruptBatchError("codec 7")

    monkeypatch.setattr("tiers.reader.remote_log_offset_reader.first_record_at_or_after", unreadable)
    answer = await bench.ask(7, 210, offset=5, timestamp=260)
    assert (answer.error_code, answer.offset) == (UNAVAILABLE, -1)


async def test_partitions_whose_turn_comes_too_late_are_unavailable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SLICE_ITEMS", 1)
    never_fresh = NeverFresh()
    monkeypatch.setattr(bench.handler._tools.log, "ensure_fresh", never_fresh)
    count = 100
    answered = [(0, EARLIEST)] * (count - 2) + [(int(ErrorCode.TOPIC_AUTHORIZATION_FAILED), EARLIEST), (0, LATEST)]
    asked = [ListOffsetsPartition("orders", each, -1, timestamp, 0) for each, (_, timestamp) in enumerate(answered)]
    request = ListOffsetsRequest(1, -1, 0, asked, timeout_ms=1)
    payload = build_response_header(ApiKey.LIST_OFFSETS, 1, 9) + INT32.pack(1)
    payload += write_string("orders", compact=False) + INT32.pack(count)
    payload += b"".join(Struct(">ihqq").pack(each, code, -1, 4) for each, (code, _) in enumerate(answered))
    exchange = FakeExchange(bench.cluster, request_frame(1, EARLIEST))
    body = b"".join(await bench.handler.complete(exchange, request, memoryview(payload)))
    answers = parse_list_offsets_response(body, response_body_position(ApiKey.LIST_OFFSETS, 1, body), 1).partitions
    unavailable, the_brokers = answers[:-2], answers[-2:]
    assert [(one.error_code, one.offset) for one in unavailable] == [(UNAVAILABLE, -1)] * (count - 2)
    assert [one.error_code for one in the_brokers] == [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.NONE]
    assert never_fresh.looks < count


@pytest.mark.parametrize("error", [ErrorCode.NONE, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
async def test_a_topic_is_used_only_when_the_broker_answers_for_it(bench: Bench, error: ErrorCode) -> None:
    await bench.ask(6, NEXT_LOCAL, offset=4, error_code=error)
    assert bench.cluster.used == (set() if error else {"orders"})
