"""A consumer at a gap between the remote tier and the broker's log: the messages on its connections, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import MetadataRequest

from protocol.api_keys import ApiKey
from tests.support.fakes.broker import fetch
from tests.support.fakes.broker.delivery import Stall
from tests.support.proxy.scenario import CLIENT_ID, END, P0, TOPIC, Client, Scenario, fetch_request, scenario
from tiers.model.log_start import LogGap

VERSIONS = (4, 12, 18)
REMOTE_END = 120
BEHIND = 150


@pytest.fixture
async def cast(tmp_path: Path) -> AsyncIterator[Scenario]:
    """Offsets 120 to 149 of partition 0 are lost."""
    async with scenario(tmp_path) as made:
        made.broker.logs[TOPIC, 0].log_start_offset = BEHIND
        await made.tier.rlmm.put_log_gap(P0, LogGap(REMOTE_END, BEHIND), 5)
        yield made


def asked(cast: Scenario) -> list[tuple[list[tuple[int, int]], int, int | None]]:
    """The requests to the broker on the client's connection: partitions and offsets, max wait, session epoch."""
    return [
        (
            [(one.partition, one.fetch_offset) for topic in request.topics for one in topic.partitions],
            request.max_wait_ms,
            request.session_epoch,
        )
        for request in cast.broker.sent_by(CLIENT_ID, FetchRequest)
    ]


async def correlation_id_of_answer(client: Client) -> int:
    return int.from_bytes((await client.wire.receive())[:4], "big")


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_broker_is_asked_twice_and_the_client_answered_once(cast: Scenario, version: int) -> None:
    async with cast.client() as client:
        answers = await client.fetch(version, 130, 10, max_wait_ms=60_000)
    assert (answers[0].error_code, bytes(answers[0].records)) == (0, cast.records_from(BEHIND))
    assert (answers[0].high_watermark, answers[1].error_code) == (END, 0)
    first, again = asked(cast)
    assert first[0] == [(0, 130), (1, 10)]
    assert again == ([(0, BEHIND)], 0, -1)
    request = cast.broker.sent_by(CLIENT_ID, FetchRequest)[1]
    assert request.session_id == 0
    assert request.topics[0].partitions[0].last_fetched_epoch == -1


async def test_later_requests_of_the_client_are_answered_after_it(cast: Scenario) -> None:
    stall = Stall()
    cast.broker.script(ApiKey.FETCH)
    cast.broker.script(ApiKey.FETCH, deliver=stall.deliver)
    async with cast.client() as client:
        await client.send(fetch_request(13, 130, max_wait_ms=60_000), 13)
        await stall.begun.wait()
        await client.send(MetadataRequest(topics=[]), 9)
        await client.send(fetch_request(13, 160, max_wait_ms=60_000), 13)
        stall.end.set()
        assert [await correlation_id_of_answer(client) for _ in range(3)] == [101, 102, 103]
    assert [partitions for partitions, _, _ in asked(cast)] == [[(0, 130)], [(0, BEHIND)], [(0, 160)]]


async def test_behind_what_the_client_sent_already_nothing_is_asked_out_of_turn(cast: Scenario) -> None:
    stall = Stall()
    cast.broker.script(ApiKey.FETCH, deliver=stall.deliver)
    async with cast.client() as client:
        await client.send(fetch_request(13, 130, max_wait_ms=1), 13)
        await stall.begun.wait()
        await client.send(MetadataRequest(topics=[]), 9)
        stall.end.set()
        assert [await correlation_id_of_answer(client) for _ in range(2)] == [101, 102]
        assert [partitions for partitions, _, _ in asked(cast)] == [[(0, 130)]]
        answers = await client.fetch(13, 130, max_wait_ms=60_000)
    assert bytes(answers[0].records) == cast.records_from(BEHIND)


async def test_a_broker_that_throttles_the_second_request_costs_one_empty_answer(cast: Scenario) -> None:
    cast.broker.script(ApiKey.FETCH)
    cast.broker.script(ApiKey.FETCH, fetch.throttled)
    async with cast.client() as client:
        answers = await client.fetch(13, 130, max_wait_ms=1)
        assert (answers[0].error_code, bytes(answers[0].records)) == (0, b"")
        answers = await client.fetch(13, 130, max_wait_ms=60_000)
    assert bytes(answers[0].records) == cast.records_from(BEHIND)
