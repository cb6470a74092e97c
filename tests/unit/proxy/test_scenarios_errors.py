"""Errors and broken answers of a broker, as the clients of a proxy see them.

The proxy passes on the broker's errors, partition by partition, whatever the remote tier has. If an answer of a broker
breaks off, stalls or is another request's, the client gets true bytes or the end of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.consumer import OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from tests.support.fakes.broker import delivery, fetch, offset_apis, produce
from tests.support.fakes.broker.delivery import Deliver, Stall
from tests.support.fakes.record_batches import batch_of
from tests.support.proxy.scenario import (
    ADVERTISED_HOST,
    END,
    P0,
    TOPIC,
    TRIMMED,
    Scenario,
    fetch_request,
    list_offsets_request,
    produce_request,
    scenario,
)

FETCH_VERSIONS = (4, 18)
FETCH_ERRORS = (-1, 2, 3, 5, 6, 9, 29, 56, 74, 75, 76, 78, 100, 103)
"""All that a broker puts into a partition of Fetch, but for OFFSET_OUT_OF_RANGE."""
LIST_OFFSETS_ERRORS = (-1, 3, 5, 6, 9, 29, 42, 43, 56, 74, 75, 78)
EPOCH_ERRORS = (-1, 3, 5, 6, 9, 29, 56, 74, 75)
DELETE_RECORDS_ERRORS = (-1, 1, 3, 6, 7, 29, 44, 56)


@pytest.fixture
async def cast(tmp_path: Path) -> AsyncIterator[Scenario]:
    async with scenario(tmp_path) as made:
        yield made


def delete_request(offset: int) -> Any:
    topic = DeleteRecordsRequest.DeleteRecordsTopic
    partition = topic.DeleteRecordsPartition(partition_index=0, offset=offset)
    return DeleteRecordsRequest(topics=[topic(name=TOPIC, partitions=[partition])], timeout_ms=60_000)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_without_a_script_both_tiers_are_one_log(cast: Scenario, version: int) -> None:
    async with cast.client() as client:
        offset, log = 0, b""
        while offset < END:
            answer = (await client.fetch(version, offset, 10, max_wait_ms=60_000))[0]
            assert answer.error_code == 0
            if answer.records:
                log += answer.records
                offset = 10 * sum(1 for n in range(len(cast.batches)) if b"".join(cast.batches[: n + 1]) in log)
        assert log == cast.records_from(0)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_fetch_errors_of_a_remote_partition_are_relayed_and_bring_no_bytes(cast: Scenario, version: int) -> None:
    async with cast.client() as client:
        for error_code in FETCH_ERRORS:
            cast.broker.script(ApiKey.FETCH, fetch.with_error(error_code, partition=0))
            answers = await client.fetch(version, 0, 0)
            assert (answers[0].error_code, bytes(answers[0].records)) == (error_code, b"")
            assert (answers[1].error_code, answers[1].high_watermark) == (0, 10)


async def test_an_error_beside_a_remote_partition_takes_nothing_from_it(cast: Scenario) -> None:
    refused = fetch.with_error(ErrorCode.TOPIC_AUTHORIZATION_FAILED, partition=1)
    async with cast.client() as client:
        cast.broker.script(ApiKey.FETCH, refused, times=1_000)
        answers = await client.fetch(18, 0, 10, max_wait_ms=60_000)
        while not answers[0].records:
            assert answers[1].error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            answers = await client.fetch(18, 0, 10)
    assert answers[1].error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert cast.records_from(0).startswith(bytes(answers[0].records))


@pytest.mark.parametrize("error_code", [70, 71, 106])
async def test_an_error_of_the_session_is_the_clients_to_see(cast: Scenario, error_code: int) -> None:
    cast.broker.script(ApiKey.FETCH, fetch.with_session_error(error_code))
    async with cast.client() as client:
        answers = await client.fetch(18, 0, 0)
        assert answers.keys() == {-1}
        assert answers[-1].error_code == error_code
        assert (await client.fetch(18, 0, 0))[1].error_code == 0


@pytest.mark.parametrize("timestamp", [-2, -3, 1_000_050])
async def test_errors_of_list_offsets_are_never_replaced_by_a_remote_offset(cast: Scenario, timestamp: int) -> None:
    async with cast.client() as client:
        for error_code in LIST_OFFSETS_ERRORS:
            cast.broker.script(ApiKey.LIST_OFFSETS, offset_apis.with_error(error_code))
            refused = (await client.ask(list_offsets_request(timestamp), 9)).topics[0].partitions[0]
            assert (refused.error_code, refused.offset, refused.leader_epoch) == (error_code, -1, -1)
        found = (await client.ask(list_offsets_request(timestamp), 9)).topics[0].partitions[0]
    assert found.error_code == 0
    assert found.offset >= 0


async def test_errors_of_offset_for_leader_epoch_are_never_replaced(cast: Scenario) -> None:
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    partition = topic.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=2)
    asked = OffsetForLeaderEpochRequest(replica_id=-1, topics=[topic(topic=TOPIC, partitions=[partition])])
    async with cast.client() as client:
        for error_code in EPOCH_ERRORS:
            cast.broker.script(ApiKey.OFFSET_FOR_LEADER_EPOCH, offset_apis.with_error(error_code))
            refused = (await client.ask(asked, 4)).topics[0].partitions[0]
            assert (refused.error_code, refused.end_offset) == (error_code, -1)
        known = (await client.ask(asked, 4)).topics[0].partitions[0]
    assert (known.error_code, known.end_offset) == (0, TRIMMED)


async def test_records_that_the_broker_did_not_delete_stay_in_the_remote_tier(cast: Scenario) -> None:
    cast.broker.logs[TOPIC, 0].epochs = [(0, 0), (5, END)]
    async with cast.client() as client:
        for error_code in DELETE_RECORDS_ERRORS:
            # The proxy lets the broker check the request first.
            cast.broker.script(ApiKey.DELETE_RECORDS, offset_apis.with_error(error_code), times=2)
            refused = (await client.ask(delete_request(50), 2)).topics[0].partitions[0]
            assert (refused.error_code, refused.low_watermark) == (error_code, -1)
            assert cast.tier.state.log_start_offset(P0) == 0
        deleted = (await client.ask(delete_request(50), 2)).topics[0].partitions[0]
    assert (deleted.error_code, deleted.low_watermark) == (0, 50)
    assert cast.tier.state.log_start_offset(P0) == 50


LARGE = 300_000
"""A Fetch answer of more than 256 KiB is not held."""


async def is_well(cast: Scenario) -> bool:
    """Only one connection broke."""
    async with cast.client() as client:
        return bytes((await client.fetch(18, 150, 0))[0].records) == cast.records_from(150)


BROKEN: dict[str, Deliver] = {
    "one byte short": delivery.truncated(1),
    "cut in a partition": delivery.truncated(40),
    "nothing but a correlation id": delivery.closed_after(8),
    "bytes behind it": delivery.prolonged(b"\x00"),
    "another correlation id": delivery.with_correlation_id(3),
    "closed in the length": delivery.closed_after(2),
    "closed in the frame": delivery.closed_after(30),
    "closed before it": delivery.closed_after(0),
}


@pytest.mark.parametrize("deliver", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("offset", [0, 150], ids=["remote", "local"])
async def test_a_broken_fetch_answer_ends_the_connection_without_a_byte(
    cast: Scenario, offset: int, deliver: Deliver
) -> None:
    cast.broker.script(ApiKey.FETCH, deliver=deliver)
    async with cast.client() as client:
        await client.send(fetch_request(18, offset, 0), 18)
        assert await client.wire.ended() == b""
    cast.broker.script(ApiKey.LIST_OFFSETS, deliver=deliver)
    async with cast.client() as client:
        await client.send(list_offsets_request(-2), 9)
        assert await client.wire.ended() == b""
    assert await is_well(cast)


@pytest.mark.parametrize("missing_bytes", [1, 40])
async def test_truncated_metadata_is_relayed_without_the_brokers_address(cast: Scenario, missing_bytes: int) -> None:
    cast.broker.script(ApiKey.METADATA, deliver=delivery.truncated(missing_bytes))
    async with cast.client() as client:
        await client.send(MetadataRequest(topics=None, allow_auto_topic_creation=False), 12)
        payload = await client.wire.receive()
        assert ADVERTISED_HOST.encode() in payload
        assert b"127.0.0.1" not in payload
        assert (await client.fetch(18, 150, 0))[0].error_code == 0


async def test_metadata_that_ends_in_its_addresses_ends_the_connection(cast: Scenario) -> None:
    cast.broker.script(ApiKey.METADATA, deliver=lambda wire, payload: wire.send(payload[:16]))
    async with cast.client() as client:
        await client.send(MetadataRequest(topics=None, allow_auto_topic_creation=False), 12)
        assert await client.wire.ended() == b""


async def test_answers_that_came_before_the_broken_one_are_delivered(cast: Scenario) -> None:
    cast.broker.script(ApiKey.FETCH)
    cast.broker.script(ApiKey.FETCH, deliver=delivery.truncated(1))
    async with cast.client() as client:
        await client.send(fetch_request(18, 150, 0), 18)
        await client.send(fetch_request(18, 160, 0), 18)
        assert cast.records_from(150) in await client.wire.receive()
        assert await client.wire.ended() == b""


@pytest.mark.parametrize("after_bytes", [100, 200_000])
async def test_a_large_answer_that_breaks_off_is_never_a_whole_frame(cast: Scenario, after_bytes: int) -> None:
    cast.broker.logs[TOPIC, 0].batches.append(batch_of(200, 1, value_bytes=LARGE))
    cast.broker.script(ApiKey.FETCH, deliver=delivery.closed_after(after_bytes))
    async with cast.client() as client:
        await client.send(fetch_request(18, 200, 0), 18)
        data = await client.wire.ended()
    assert len(data) <= after_bytes
    assert not data or int.from_bytes(data[:4], "big") > LARGE
    assert await is_well(cast)


async def test_a_large_answer_with_a_truncated_message_ends_before_its_frame(cast: Scenario) -> None:
    cast.broker.logs[TOPIC, 0].batches.append(batch_of(200, 1, value_bytes=LARGE))
    cast.broker.script(ApiKey.FETCH, deliver=delivery.prolonged(b"\x00" * 9))
    async with cast.client() as client:
        await client.send(fetch_request(18, 200, 0), 18)
        data = await client.wire.ended()
    assert len(data) < 4 + int.from_bytes(data[:4], "big")


async def test_nothing_remote_is_let_out_while_the_broker_has_not_answered(cast: Scenario) -> None:
    async with cast.client() as client:
        while not (await client.fetch(18, 0, 10))[0].records:
            pass
        stall = Stall(after_bytes=20)
        cast.broker.script(ApiKey.FETCH, fetch.with_error(29), deliver=stall.deliver)
        await client.send(fetch_request(18, 10, 10), 18)
        async with asyncio.timeout(60):
            await stall.begun.wait()
        answer = asyncio.create_task(client.wire.receive())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not answer.done()
        stall.end.set()
        payload = await answer
    assert not any(batch in payload for batch in cast.batches)


@pytest.mark.parametrize("version", [7, 18])
async def test_a_throttled_fetch_passes_with_its_time_and_brings_nothing(cast: Scenario, version: int) -> None:
    cast.broker.script(ApiKey.FETCH, fetch.throttled)
    async with cast.client() as client:
        throttled = await client.fetch(version, 0, 0)
        assert throttled.keys() == {-1}
        assert throttled[-1].throttle_time_ms == fetch.THROTTLE_MS
        assert (await client.fetch(version, 0, 0))[-1].throttle_time_ms == 0


async def test_a_throttle_time_stays_beside_what_the_remote_tier_changes(cast: Scenario) -> None:
    cast.broker.script(ApiKey.LIST_OFFSETS, offset_apis.throttled)
    cast.broker.script(ApiKey.PRODUCE, produce.throttled, produce.led_by(7, "broker-7.internal", 9_092))
    async with cast.client() as client:
        listed = await client.ask(list_offsets_request(-2), 9)
        produced = await client.ask(produce_request(12), 12)
    assert (listed.throttle_time_ms, listed.topics[0].partitions[0].offset) == (fetch.THROTTLE_MS, 0)
    assert produced.throttle_time_ms == fetch.THROTTLE_MS
