from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.consumer import FetchResponse as KafkaPythonFetchResponse

from protocol.addresses import address_splices
from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.response import FetchResponse, out_of_range, parse_fetch_response, rebuild_response
from protocol.errors import ProtocolError
from protocol.splice import Splice
from tests.support.fakes.message_encoder import RECORDS, Message, encoded_messages

FETCH = 1
TOPIC_ID = UUID(int=7)
OFFSETS = {
    "HighWatermark": st.integers(-1, 2**62),
    "ErrorCode": st.sampled_from([0, 0, 0, 1, 3, 6]),
    "Records": RECORDS,
}

GOLDEN_V12 = bytes.fromhex(
    "00000000 0000 00000000"  # throttle, error, session
    "02 02 74"  # one topic, "t"
    "02 00000000 0000"  # one partition, 0, no error
    "000000000000000a 000000000000000a 0000000000000000"  # high watermark, last stable offset, log start offset
    "00 ffffffff 01"  # aborted transactions null, no preferred replica, no records
    "00 00 00"  # tagged sections of the partition, the topic, the response
)


@st.composite
def responses(draw: st.DrawFn) -> tuple[int, Message]:
    version = draw(st.integers(4, 18))
    return version, draw(encoded_messages("FetchResponse", version, OFFSETS))


def topic_key(tree: dict[str, Any]) -> Any:
    return tree["TopicId"] if "TopicId" in tree else tree["Topic"]


def assert_reads(response: FetchResponse, tree: dict[str, Any]) -> None:
    assert response.throttle_time_ms == tree["ThrottleTimeMs"]
    assert response.error_code == tree.get("ErrorCode", 0)
    assert response.session_id == tree.get("SessionId", 0)
    trees = [(topic_key(topic), p) for topic in tree["Responses"] for p in topic["Partitions"]]
    assert len(response.partitions) == len(trees)
    for partition, (topic, expected) in zip(response.partitions, trees, strict=True):
        assert partition.topic == topic
        assert partition.partition == expected["PartitionIndex"]
        assert partition.error_code == expected["ErrorCode"]
        assert partition.high_watermark == expected["HighWatermark"]
        assert partition.last_stable_offset == expected["LastStableOffset"]
        assert partition.log_start_offset == expected.get("LogStartOffset", -1)
        assert partition.preferred_read_replica == expected.get("PreferredReadReplica", -1)
        assert response.records(partition) == (expected["Records"] or b"")
        assert partition.records_bytes == len(expected["Records"] or b"")
        aborted = expected["AbortedTransactions"]
        assert response.aborted_transactions(partition) == (
            None if aborted is None else tuple((a["ProducerId"], a["FirstOffset"]) for a in aborted)
        )
        diverging = expected.get("DivergingEpoch")
        assert response.diverging_epoch(partition) == (diverging and (diverging["Epoch"], diverging["EndOffset"]))
        leader = expected.get("CurrentLeader")
        assert response.current_leader(partition) == (leader and (leader["LeaderId"], leader["LeaderEpoch"]))


@given(responses(), st.binary(max_size=9))
def test_every_version_is_read(message: tuple[int, Message], header: bytes) -> None:
    version, (body, tree) = message
    response = parse_fetch_response(header + body, len(header), version)
    assert_reads(response, tree)
    endpoints = response.node_endpoints_bounds()
    assert (endpoints is not None) == ("NodeEndpoints" in tree)
    (unchanged,) = rebuild_response(response)
    assert unchanged == header + body
    codes = [p["ErrorCode"] for topic in tree["Responses"] for p in topic["Partitions"]]
    assert out_of_range(response) == [i for i, code in enumerate(codes) if code == 1]
    with pytest.raises(ProtocolError):
        parse_fetch_response(body + b"\x00", 0, version)


@given(responses(), st.data())
def test_a_rebuild_changes_what_it_names_alone(message: tuple[int, Message], data: st.DataObject) -> None:
    version, (body, tree) = message
    response = parse_fetch_response(body, 0, version)
    log_starts: dict[int, int] = {}
    replaced: dict[int, list[bytes]] = {}
    donor = parse_fetch_response(body, 0, version)
    trees = [p for topic in tree["Responses"] for p in topic["Partitions"]]
    expected = [dict(p) for p in trees]
    for index in range(len(trees)):
        change = data.draw(st.sampled_from(["none", "log start", "entry", "both"]))
        if change in ("log start", "both"):
            log_starts[index] = data.draw(st.integers(0, 2**60))
            if version >= 5:
                expected[index]["LogStartOffset"] = log_starts[index]
        if change in ("entry", "both"):
            source = data.draw(st.integers(0, len(trees) - 1))
            entry = donor.partitions[source]
            replaced[index] = [body[entry.start : entry.start + 7], body[entry.start + 7 : entry.end], b""]
            expected[index] = dict(trees[source])
    remaining = iter(expected)
    expected_topics = [t | {"Partitions": [next(remaining) for _ in t["Partitions"]]} for t in tree["Responses"]]
    session_id = data.draw(st.none() | st.integers(0, 100))
    expected_tree = tree | {"Responses": expected_topics}
    if session_id is not None and version >= 7:
        expected_tree["SessionId"] = session_id

    rebuilt = b"".join(
        rebuild_response(response, entries=replaced, log_start_offsets=log_starts, session_id=session_id)
    )
    again = parse_fetch_response(rebuilt, 0, version)
    assert_reads(again, expected_tree)
    for index, partition in enumerate(again.partitions):
        if index not in replaced and index not in log_starts:
            old = response.partitions[index]
            assert rebuilt[partition.start : partition.end] == body[old.start : old.end]
    assert rebuilt[again.tags_position :] == body[response.tags_position :]


def test_a_rebuild_takes_further_splices_and_copies_no_records() -> None:
    records = bytes(range(256)) * 4
    body = GOLDEN_V12[:-4] + b"\x81\x08" + records + GOLDEN_V12[-3:]
    payload = b"\x00\x00\x00\x07\x00" + body
    response = parse_fetch_response(payload, 5, 12)
    end = len(payload)
    buffers = rebuild_response(
        response, log_start_offsets={0: 3}, session_id=9, splices=[Splice(end - 1, end, b"\x01\x14\x01\xff")]
    )
    again = parse_fetch_response(b"".join(buffers), 5, 12)
    assert (again.session_id, again.partitions[0].log_start_offset) == (9, 3)
    assert bytes(again.payload).endswith(b"\x01\x14\x01\xff")
    (held,) = [b for b in buffers if len(b) >= len(records)]
    assert isinstance(held, memoryview)
    assert held.obj is payload


def test_changes_that_overlap_are_refused() -> None:
    response = parse_fetch_response(GOLDEN_V12, 0, 12)
    inside = response.partitions[0].start + 1
    with pytest.raises(ValueError, match="overlaps"):
        rebuild_response(response, entries={0: [b"x"]}, splices=[Splice(inside, inside + 1, b"")])


@pytest.mark.parametrize("version", [3, 19])
def test_versions_that_are_not_read(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"version {version}"):
        parse_fetch_response(bytes(100), 0, version)


def test_a_diverging_epoch_of_too_few_bytes() -> None:
    body = GOLDEN_V12[:-3] + b"\x01\x00\x02\x00\x00" + GOLDEN_V12[-2:]
    response = parse_fetch_response(body, 0, 12)
    with pytest.raises(ProtocolError, match="tag 0 of 2 bytes"):
        response.diverging_epoch(response.partitions[0])
    assert response.current_leader(response.partitions[0]) is None


def test_addresses_are_rewritten_beside_other_changes() -> None:
    endpoints = bytes.fromhex("02 00000001 02 68 00000009 00 00")
    body = b"".join(encode_response(16, 1, [(TOPIC_ID, [encode_partition(16, 0, records=[b"records"])])]))
    payload = body[:-1] + b"\x01\x00" + bytes((len(endpoints),)) + endpoints
    response = parse_fetch_response(payload, 5, 16)
    splices = address_splices(FETCH, 16, payload, lambda node_id: ("proxy.example", 9000 + node_id))
    rebuilt = b"".join(rebuild_response(response, log_start_offsets={0: 3}, session_id=0, splices=splices))
    theirs = KafkaPythonFetchResponse.decode(rebuilt[5:], version=16)
    assert [(n.node_id, n.host, n.port) for n in theirs.node_endpoints] == [(1, "proxy.example", 9001)]
    assert theirs.responses[0].partitions[0].log_start_offset == 3
    assert theirs.responses[0].partitions[0].records == b"records"
