"""What the broker refuses, partition by partition, is refused in its words, whatever the remote tier has beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.consumer import OffsetForLeaderEpochRequest

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from tests.support.fakes.broker import delete_records, fetch, list_offsets, offset_for_leader_epoch
from tests.support.proxy.scenario import END, P0, TOPIC, TRIMMED, Scenario, list_offsets_request, scenario

FETCH_VERSIONS = (4, 7, 11, 12, 13, 18)
FETCH_ERRORS = (-1, 2, 3, 5, 6, 9, 29, 56, 74, 75, 76, 78, 100, 103)
"""All that a broker puts into a partition of Fetch, but for OFFSET_OUT_OF_RANGE."""
LIST_OFFSETS_ERRORS = (-1, 3, 5, 6, 9, 29, 42, 43, 56, 74, 75, 78)
EPOCH_ERRORS = (-1, 3, 5, 6, 9, 29, 56, 74, 75)
DELETE_RECORDS_ERRORS = (-1, 1, 3, 6, 7, 29, 44, 56)


@pytest.fixture
async def cast(tmp_path: Path) -> AsyncIterator[Scenario]:
    async with scenario(tmp_path) as made:
        yield made


def epoch_request(epoch: int) -> Any:
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    partition = topic.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=epoch)
    return OffsetForLeaderEpochRequest(replica_id=-1, topics=[topic(topic=TOPIC, partitions=[partition])])


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


@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_an_error_beside_a_remote_partition_takes_nothing_from_it(cast: Scenario, version: int) -> None:
    async with cast.client() as client:
        await client.fetch(version, 0, 10)
        cast.broker.script(
            ApiKey.FETCH, fetch.with_error(ErrorCode.TOPIC_AUTHORIZATION_FAILED, partition=1), times=1_000
        )
        answers = await client.fetch(version, 0, 10)
        while not answers[0].records:
            assert answers[1].error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            answers = await client.fetch(version, 0, 10)
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


@pytest.mark.parametrize("timestamp", [-1, -2, -3, -4, -5, 1_000_050])
async def test_errors_of_list_offsets_are_never_replaced_by_a_remote_offset(cast: Scenario, timestamp: int) -> None:
    async with cast.client() as client:
        for error_code in LIST_OFFSETS_ERRORS:
            cast.broker.script(ApiKey.LIST_OFFSETS, list_offsets.with_error(error_code))
            refused = (await client.ask(list_offsets_request(timestamp), 9)).topics[0].partitions[0]
            assert (refused.error_code, refused.offset, refused.leader_epoch) == (error_code, -1, -1)
        found = (await client.ask(list_offsets_request(timestamp), 9)).topics[0].partitions[0]
    assert found.error_code == 0
    assert found.offset >= 0


async def test_errors_of_offset_for_leader_epoch_are_never_replaced(cast: Scenario) -> None:
    async with cast.client() as client:
        for error_code in EPOCH_ERRORS:
            cast.broker.script(ApiKey.OFFSET_FOR_LEADER_EPOCH, offset_for_leader_epoch.with_error(error_code))
            refused = (await client.ask(epoch_request(2), 4)).topics[0].partitions[0]
            assert (refused.error_code, refused.end_offset) == (error_code, -1)
        known = (await client.ask(epoch_request(2), 4)).topics[0].partitions[0]
    assert (known.error_code, known.end_offset) == (0, TRIMMED)


async def test_what_the_broker_did_not_delete_stays_in_the_remote_tier(cast: Scenario) -> None:
    cast.broker.logs[TOPIC, 0].epochs = [(0, 0), (5, END)]
    async with cast.client() as client:
        for error_code in DELETE_RECORDS_ERRORS:
            cast.broker.script(ApiKey.DELETE_RECORDS, delete_records.with_error(error_code))
            refused = (await client.ask(delete_request(50), 2)).topics[0].partitions[0]
            assert (refused.error_code, refused.low_watermark) == (error_code, -1)
            assert cast.tier.rlmm.log_start_offset(P0) == 0
        deleted = (await client.ask(delete_request(50), 2)).topics[0].partitions[0]
    assert (deleted.error_code, deleted.low_watermark) == (0, 50)
    assert cast.tier.rlmm.log_start_offset(P0) == 50
