"""What the clients of the benchmark send, and how they read the answers."""

from __future__ import annotations

import argparse

import pytest
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from bench.clients.backfill_reader import Range
from bench.clients.librdkafka import Target, add_target, target_of
from bench.clients.lines import LineProcess
from bench.clients.many_connections import FETCH_VERSION, fetch_request
from bench.clients.round_trips import VALUE, VERSION, error_of, produce_request
from bench.first_record import places_of
from bench.rig.stage import SEGMENT_BYTES, History
from protocol.records.record_batch import iterate_batches

HEADER_BYTES = 4 + 2 + 2 + 4 + 2


def body(frame: bytes, client_id: str) -> bytes:
    """Returns the body of a request with a flexible header."""
    return frame[HEADER_BYTES + len(client_id) + 1 :]


def test_a_round_trip_writes_one_whole_record() -> None:
    request = ProduceRequest.decode(body(produce_request("t"), "round-trips"), VERSION)
    (topic,) = request.topic_data
    (partition,) = topic.partition_data
    (batch,) = iterate_batches(partition.records)
    assert (topic.name, partition.index, request.acks, batch.records_count) == ("t", 0, 1, 1)
    assert VALUE in bytes(partition.records)


@pytest.mark.parametrize("error", [0, 3, 6])
@pytest.mark.parametrize("topic", ["t", "a-longer-name"])
def test_the_error_of_an_answer_is_found(topic: str, error: int) -> None:
    of = ProduceResponse.TopicProduceResponse
    one = of.PartitionProduceResponse(version=VERSION, index=0, error_code=error, base_offset=77)
    message = ProduceResponse(
        version=VERSION, responses=[of(version=VERSION, name=topic, partition_responses=[one])], throttle_time_ms=0
    )
    correlation_id_and_tags = b"\0\0\0\1\0"
    assert error_of(correlation_id_and_tags + bytes(message.encode(version=VERSION)), topic) == error


def test_a_fetch_session_names_its_partitions_once() -> None:
    first = FetchRequest.decode(body(fetch_request("t", 100, 0, 0), "many"), FETCH_VERSION)
    later = FetchRequest.decode(body(fetch_request("t", 100, 17, 3), "many"), FETCH_VERSION)
    assert [len(topic.partitions) for topic in first.topics] == [100]
    assert (later.topics, later.session_id, later.session_epoch) == ([], 17, 3)


def test_seeks_go_to_different_segments() -> None:
    records = SEGMENT_BYTES // 1024
    history = History("t", Range(0, 0, 30 * records + 5))
    places = places_of(history, 25, seed=1)
    segments = [offset // records for _, offset in places]
    assert len(set(segments)) == len(segments) == 26
    assert all(0 <= offset < history.range.end for _, offset in places)
    assert places != places_of(history, 25, seed=2)


def test_a_short_history_has_fewer_seeks() -> None:
    assert len(places_of(History("t", Range(0, 0, 3 * SEGMENT_BYTES // 1024)), 25, seed=1)) == 2


def test_a_target_survives_a_command_line() -> None:
    target = Target("a:1,b:2", "t", {"security.protocol": "ssl", "sasl.password": "x=y"})
    arguments = argparse.ArgumentParser()
    add_target(arguments)
    assert target_of(arguments.parse_args(target.arguments())) == target


def test_a_range_begins_behind_a_share() -> None:
    assert [Range(0, 100, 200).at(share) for share in (0.0, 0.25, 0.5)] == [100, 125, 150]


def test_a_client_that_fails_says_why() -> None:
    """It cannot take an argument that it does not know."""
    with LineProcess("bench.clients.backfill_reader", ["--nonsense"]) as reader, pytest.raises(RuntimeError) as raised:
        reader.wait_for_lines()
    assert "--bootstrap" in str(raised.value)
