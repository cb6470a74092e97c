from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.apis.fetch.request import (
    FetchRequest,
    parse_fetch_request,
    patch_fetch_request,
    topics_of,
    topics_position,
)
from protocol.errors import ProtocolError
from protocol.steps import finished
from tests.support.fakes.message_encoder import Message, encoded_messages

VERSIONS = st.integers(4, 18)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, Message]:
    version = draw(VERSIONS)
    return version, draw(encoded_messages("FetchRequest", version))


def topic_key(tree: dict[str, Any]) -> Any:
    return tree["TopicId"] if "TopicId" in tree else tree["Topic"]


def assert_reads(request: FetchRequest, tree: dict[str, Any], version: int) -> None:
    replica_id = tree.get("ReplicaState", {}).get("ReplicaId", -1) if version >= 15 else tree["ReplicaId"]
    assert request.replica_id == replica_id
    assert request.max_wait_ms == tree["MaxWaitMs"]
    assert request.min_bytes == tree["MinBytes"]
    assert request.max_bytes == tree["MaxBytes"]
    assert request.isolation_level == tree["IsolationLevel"]
    assert request.session_id == tree.get("SessionId", 0)
    assert request.session_epoch == tree.get("SessionEpoch", -1)
    assert [t.topic for t in request.topics] == [topic_key(t) for t in tree["Topics"]]
    assert [
        (p.topic, p.partition, p.current_leader_epoch, p.fetch_offset, p.last_fetched_epoch, p.partition_max_bytes)
        for p in request.partitions
    ] == [
        (
            topic_key(topic),
            p["Partition"],
            p.get("CurrentLeaderEpoch", -1),
            p["FetchOffset"],
            p.get("LastFetchedEpoch", -1),
            p["PartitionMaxBytes"],
        )
        for topic in tree["Topics"]
        for p in topic["Partitions"]
    ]
    forgotten = tree.get("ForgottenTopicsData", [])
    assert request.forgotten == [(topic_key(t), tuple(t["Partitions"])) for t in forgotten]


@given(requests(), st.binary(max_size=20), st.binary(max_size=3))
def test_every_version_is_read_and_what_follows_is_ignored(
    message: tuple[int, Message], header: bytes, more: bytes
) -> None:
    version, (body, tree) = message
    assert parse_fetch_request(body + more, 0, version)._replace(payload=body) == parse_fetch_request(body, 0, version)
    request = parse_fetch_request(header + body, len(header), version)
    assert_reads(request, tree, version)
    assert topics_of(header + body, len(header), version) == [topic_key(t) for t in tree["Topics"]]
    assert request.topics_position == topics_position(len(header), version)


@given(requests(), st.integers(0, 2**31 - 1))
def test_patches_change_their_field_alone(message: tuple[int, Message], value: int) -> None:
    version, (body, tree) = message
    fields = {"max_wait_ms": "MaxWaitMs", "min_bytes": "MinBytes", "max_bytes": "MaxBytes"}
    if version >= 7:
        fields |= {"session_id": "SessionId", "session_epoch": "SessionEpoch"}
    for argument, name in fields.items():
        patched = bytearray(b"head" + body)
        patch_fetch_request(patched, 4, version, **{argument: value})
        assert len(patched) == 4 + len(body)
        assert patched[:4] == b"head"
        assert_reads(parse_fetch_request(patched, 4, version), tree | {name: value}, version)
        patch_fetch_request(patched, 4, version, **{argument: tree[name]})
        assert patched[4:] == body
    if version < 7:  # without sessions
        patch_fetch_request(patched := bytearray(body), 0, version, session_id=0, session_epoch=-1)
        assert patched == body


@given(requests(), st.data())
def test_a_request_for_some_partitions(message: tuple[int, Message], data: st.DataObject) -> None:
    version, (body, tree) = message
    request = parse_fetch_request(b"head" + body, 4, version)
    kept = {i for i in range(len(request.partitions)) if data.draw(st.booleans())}
    reduced = finished(request.with_only(kept))
    assert reduced[:4] == b"head"

    index = 0
    expected_topics = []
    for topic in tree["Topics"]:
        partitions = []
        for partition in topic["Partitions"]:
            if index in kept:
                partitions.append(partition)
            index += 1
        if partitions:
            expected_topics.append(topic | {"Partitions": partitions})
    expected = tree | {"Topics": expected_topics}
    if version >= 7:
        expected["ForgottenTopicsData"] = []
    again = parse_fetch_request(reduced, 4, version)
    assert_reads(again, expected, version)
    entries = [bytes(request.payload[p.start : p.end]) for i, p in enumerate(request.partitions) if i in kept]
    assert [bytes(reduced[p.start : p.end]) for p in again.partitions] == entries


@given(requests(), st.data())
def test_entries_that_stay_may_ask_for_other_offsets(message: tuple[int, Message], data: st.DataObject) -> None:
    """The last Fetch says nothing about those partitions. Everything else is unchanged, unknown tags included."""
    version, (body, _) = message
    request = parse_fetch_request(b"head" + body, 4, version)
    offsets = {i: data.draw(st.integers(0, 2**62)) for i in range(len(request.partitions)) if data.draw(st.booleans())}
    as_it_was = parse_fetch_request(finished(request.with_only(offsets)), 4, version)
    moved = parse_fetch_request(finished(request.with_only(offsets, offsets)), 4, version)
    assert moved._replace(payload=b"", partitions=[]) == as_it_was._replace(payload=b"", partitions=[])
    assert moved.partitions == [
        one._replace(fetch_offset=offset, last_fetched_epoch=-1)
        for one, offset in zip(as_it_was.partitions, offsets.values(), strict=True)
    ]
    changed = 12 if version >= 12 else 8
    for one in moved.partitions:
        differing = [n for n in range(one.start, one.end) if moved.payload[n] != as_it_was.payload[n]]
        assert len(differing) <= changed


@pytest.mark.parametrize("version", [3, 19])
def test_versions_that_are_not_read(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"version {version}"):
        parse_fetch_request(bytes(100), 0, version)


def test_a_follower_is_known_by_its_replica_id() -> None:
    body = bytearray(bytes.fromhex("00000005 000001f4 00000001 00000001 00 00000000"))
    for replica_id, is_follower in ((5, True), (0, True), (-1, False), (-2, False), (-3, True)):
        body[:4] = replica_id.to_bytes(4, "big", signed=True)
        request = parse_fetch_request(body, 0, 4)
        assert (request.replica_id, request.is_from_follower) == (replica_id, is_follower)
        assert (request.is_full, request.is_read_committed) == (True, False)


V12_REQUEST = bytes.fromhex(
    "ffffffff 000001f4 00000001 00100000 00"  # replica, max wait, min and max bytes, isolation level
    "00000000 ffffffff"  # no session
    "02 02 74"  # one topic, "t"
    "02 00000003 00000004 0000000000000063 00000005 ffffffffffffffff 00010000 00"  # partition 3 from offset 99
    "00"  # tagged section of the topic
    "01 01 00"  # nothing forgotten, no rack, no tags
)


@pytest.mark.parametrize(
    "tail",
    [
        "01 01 01 01 0e 00000001 0000000000000002 00",  # a replica state of 14 bytes in 13
        "01 01 91 4e",  # 10,001 tagged fields
        "02 02 74 03 00000001 00",  # two forgotten partitions in one
    ],
)
def test_the_fields_after_the_topics_are_checked(tail: str) -> None:
    parse_fetch_request(V12_REQUEST[:-3] + bytes.fromhex("01 01 00"), 0, 12)
    with pytest.raises(ProtocolError):
        parse_fetch_request(V12_REQUEST[:-3] + bytes.fromhex(tail), 0, 12)


def test_a_topic_without_a_name() -> None:
    with pytest.raises(ProtocolError, match="without a name"):
        parse_fetch_request(V12_REQUEST.replace(b"\x02t\x02", b"\x00\x02"), 0, 12)
