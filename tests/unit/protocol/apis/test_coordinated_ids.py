"""The ids of requests to coordinators are read from their first bytes; every request can be refused in its format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.apis.coordinated_ids import (
    GROUP_APIS,
    TRANSACTION_APIS,
    CoordinatedIds,
    deleted_groups,
    peek_ids,
    refusal,
    with_refused_groups,
    without_groups,
)
from protocol.errors import ErrorCode, TruncatedError
from protocol.header import build_request_header, build_response_header
from protocol.header import response_body_position as body_at
from protocol.message_schema import message_name
from protocol.schema import compile_message
from protocol.wire_shape import FieldSpan
from tests.support.fakes.message_encoder import Message, Value, encode, encoded_messages, message_names

CODE = ErrorCode.GROUP_AUTHORIZATION_FAILED
ALL = [
    (key, version)
    for key in (*TRANSACTION_APIS, *GROUP_APIS)
    for version in range(DECODED_APIS[key].min_version, DECODED_APIS[key].max_version + 1)
]
WITH_SCHEMA = [(key, version) for key, version in ALL if message_name(key, "Request") in message_names()]
WITHOUT_SCHEMA = [each for each in ALL if each not in WITH_SCHEMA]
OF_PARTITIONS = {ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT}


def requests(key: ApiKey, version: int) -> st.SearchStrategy[Message]:
    header = build_request_header(key, version, 7, "client")
    made = encoded_messages(message_name(key, "Request"), version)
    return made.map(lambda message: Message(header + message.payload, message.tree))


def fields(key: int, version: int, payload: bytes) -> list[FieldSpan]:
    """Returns the fields of a response, which must end where the payload ends."""
    spans = compile_message(key, version, "Response").walk(payload, body_at(key, version, payload))
    assert spans[-1].end == len(payload)
    return [span for span in spans if span.kind == "value"]


@pytest.mark.parametrize(("key", "version"), WITH_SCHEMA)
@settings(max_examples=20)
@given(data=st.data())
def test_the_ids_are_read_from_the_first_bytes(key: ApiKey, version: int, data: st.DataObject) -> None:
    frame, tree = data.draw(requests(key, version))
    transactional_id = tree.get("TransactionalId", tree.get("V3AndBelowTransactionalId"))
    ids = CoordinatedIds(transactional_id, tree.get("GroupId"))
    assert peek_ids(frame) == ids
    needed = 0
    for size in range(len(frame)):
        try:
            assert peek_ids(frame[:size]) == ids
        except TruncatedError:
            needed = size + 1
    assert needed <= len(frame)
    assert needed >= len((transactional_id or "").encode()) + len((tree.get("GroupId") or "").encode())


@pytest.mark.parametrize(("key", "version"), [each for each in WITH_SCHEMA if each[0] not in OF_PARTITIONS])
@settings(max_examples=5)
@given(data=st.data())
def test_a_refusal_has_the_format_of_the_version(key: ApiKey, version: int, data: st.DataObject) -> None:
    payload = refusal(data.draw(requests(key, version)).payload, CODE)
    assert int.from_bytes(payload[:4], "big", signed=True) == 7
    (code,) = (span for span in fields(key, version, payload) if str(span.path[-1]).endswith("ErrorCode"))
    assert code.path == ("ErrorCode",)
    assert int.from_bytes(payload[code.start : code.end]) == CODE


@pytest.mark.parametrize(("key", "version"), [each for each in WITH_SCHEMA if each[0] in OF_PARTITIONS])
@settings(max_examples=20)
@given(data=st.data())
def test_a_refusal_answers_every_partition(key: ApiKey, version: int, data: st.DataObject) -> None:
    """A broker does so, too."""
    frame, tree = data.draw(requests(key, version))
    is_by_id = key == ApiKey.OFFSET_COMMIT and version >= 10
    result: Value = {"ThrottleTimeMs": 0}
    if key == ApiKey.ADD_PARTITIONS_TO_TXN:
        result["ResultsByTopicV3AndBelow"] = [
            {
                "Name": topic["Name"],
                "ResultsByPartition": [
                    {"PartitionIndex": index, "PartitionErrorCode": CODE} for index in topic["Partitions"]
                ],
            }
            for topic in tree["V3AndBelowTopics"]
        ]
    else:
        name = "TopicId" if is_by_id else "Name"
        result["Topics"] = [
            {
                name: topic[name],
                "Partitions": [
                    {"PartitionIndex": one["PartitionIndex"], "ErrorCode": CODE} for one in topic["Partitions"]
                ],
            }
            for topic in tree["Topics"]
        ]
    body = bytes(encode(message_name(key, "Response"), version, result).data)
    assert refusal(frame, CODE) == build_response_header(key, version, 7) + body


@pytest.mark.parametrize(("key", "version"), WITHOUT_SCHEMA)
def test_a_heartbeat_of_a_newer_group_is_refused_in_its_format(key: ApiKey, version: int) -> None:
    """The group id is the first field, and the versions are flexible from 0 on."""
    frame = build_request_header(key, version, 7, "client") + b"\x04own" + b"\x05more" + bytes(9)
    assert peek_ids(frame) == (None, "own")
    payload = refusal(frame, CODE)
    (code,) = (span for span in fields(key, version, payload) if span.path == ("ErrorCode",))
    assert int.from_bytes(payload[code.start : code.end]) == CODE


def test_the_apis_without_a_schema_of_their_requests() -> None:
    assert {key for key, _ in WITHOUT_SCHEMA} == {
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.SHARE_GROUP_HEARTBEAT,
        ApiKey.STREAMS_GROUP_HEARTBEAT,
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
    }


@pytest.mark.parametrize("version", range(3))
@given(names=st.lists(st.sampled_from(["a", "own", "b", "tøpic"]), max_size=5), results=st.integers(0, 3))
def test_groups_are_taken_out_of_a_deletion_and_refused(version: int, names: list[str], results: int) -> None:
    compact = version >= 2

    def text(value: str) -> bytes:
        raw = value.encode()
        return (bytes([len(raw) + 1]) if compact else len(raw).to_bytes(2)) + raw

    def count(value: int) -> bytes:
        return bytes([value + 1]) if compact else value.to_bytes(4)

    def request(groups: list[str]) -> bytes:
        body = count(len(groups)) + b"".join(map(text, groups)) + (b"\x01\x09\x02ab" if compact else b"")
        return build_request_header(ApiKey.DELETE_GROUPS, version, 7, "client") + body

    def response(entries: list[tuple[str, int]]) -> bytes:
        body = bytes(4) + count(len(entries))
        body += b"".join(text(name) + code.to_bytes(2) + (b"\0" if compact else b"") for name, code in entries)
        return build_response_header(ApiKey.DELETE_GROUPS, version, 7) + body + (b"\x01\x09\x02ab" if compact else b"")

    assert deleted_groups(request(names)) == names
    assert without_groups(request(names), frozenset(["own"])) == request([name for name in names if name != "own"])
    others = [(f"other-{number}", number) for number in range(results)]
    assert with_refused_groups(response(others), version, ["own"], CODE) == response([("own", CODE), *others])
