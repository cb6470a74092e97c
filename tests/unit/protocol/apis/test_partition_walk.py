"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords are read by the schema, and only the field is patched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.apis.delete_records import (
    DeleteRecordsAnswer,
    parse_delete_records_request,
    parse_delete_records_response,
    patch_delete_records_response,
)
from protocol.apis.list_offsets import (
    ListOffsetsAnswer,
    parse_list_offsets_request,
    parse_list_offsets_response,
    patch_list_offsets_response,
)
from protocol.apis.offset_for_leader_epoch import (
    EpochAnswer,
    parse_offset_for_leader_epoch_request,
    parse_offset_for_leader_epoch_response,
    patch_offset_for_leader_epoch_response,
)
from protocol.errors import ProtocolError
from tests.support.fakes.message_encoder import Message, encoded_messages

int16s = st.integers(-(2**15), 2**15 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)


class Api(NamedTuple):
    name: str
    versions: range
    parse_request: Callable[[bytes, int, int], Any]
    parse_response: Callable[[bytes, int, int], Any]
    patch: Callable[[Any, Mapping[int, Any]], bytearray]
    topic: str
    """The names of two fields in the schema: of the topic's name, and of the partition."""
    partition: str
    request_fields: tuple[str, ...]
    response_fields: tuple[str, ...]
    answers: st.SearchStrategy[Any]
    """Of an answer's fields, which are some of those of a response."""

    def theirs(self, field: str) -> str:
        return self.partition if field == "partition" else "".join(map(str.capitalize, field.split("_")))


LIST_OFFSETS = Api(
    "ListOffsets",
    range(1, 12),
    parse_list_offsets_request,
    parse_list_offsets_response,
    patch_list_offsets_response,
    "Name",
    "PartitionIndex",
    ("partition", "current_leader_epoch", "timestamp"),
    ("partition", "error_code", "timestamp", "offset", "leader_epoch"),
    st.builds(ListOffsetsAnswer, int16s, int64s, int64s, int32s),
)
OFFSET_FOR_LEADER_EPOCH = Api(
    "OffsetForLeaderEpoch",
    range(2, 5),
    parse_offset_for_leader_epoch_request,
    parse_offset_for_leader_epoch_response,
    patch_offset_for_leader_epoch_response,
    "Topic",
    "Partition",
    ("partition", "current_leader_epoch", "leader_epoch"),
    ("error_code", "partition", "leader_epoch", "end_offset"),
    st.builds(EpochAnswer, int16s, int32s, int64s),
)
DELETE_RECORDS = Api(
    "DeleteRecords",
    range(3),
    parse_delete_records_request,
    parse_delete_records_response,
    patch_delete_records_response,
    "Name",
    "PartitionIndex",
    ("partition", "offset"),
    ("partition", "low_watermark", "error_code"),
    st.builds(DeleteRecordsAnswer, int64s, int16s),
)
APIS = [LIST_OFFSETS, OFFSET_FOR_LEADER_EPOCH, DELETE_RECORDS]

every_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)


def draw_message(data: st.DataObject, api: Api, kind: str) -> tuple[int, Message]:
    version = data.draw(st.sampled_from(api.versions))
    return version, data.draw(encoded_messages(api.name + kind, version))


def expected_partitions(api: Api, tree: dict[str, Any], fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """A version may lack leader epochs, which then read as -1."""
    return [
        (topic[api.topic], *(partition.get(api.theirs(name), -1) for name in fields))
        for topic in tree["Topics"]
        for partition in topic["Partitions"]
    ]


def read_partitions(partitions: list[Any], fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return [(p.topic, *(getattr(p, name) for name in fields)) for p in partitions]


@every_api
@given(data=st.data())
def test_requests_of_every_version(api: Api, data: st.DataObject) -> None:
    version, (body, tree) = draw_message(data, api, "Request")
    request = api.parse_request(b"head" + body, 4, version)
    assert request.version == version
    assert read_partitions(request.partitions, api.request_fields) == expected_partitions(api, tree, api.request_fields)
    if hasattr(request, "replica_id"):
        assert request.replica_id == tree.get("ReplicaId", -2)
    if hasattr(request, "isolation_level"):
        assert request.isolation_level == tree.get("IsolationLevel", 0)
        assert request.is_read_committed is (request.isolation_level == 1)
    if hasattr(request, "timeout_ms"):
        assert request.timeout_ms == tree.get("TimeoutMs", 0)


@every_api
@given(data=st.data())
def test_responses_are_read_and_patches_change_what_they_name_alone(api: Api, data: st.DataObject) -> None:
    version, (body, tree) = draw_message(data, api, "Response")
    response = api.parse_response(b"head" + body, 4, version)
    assert response.throttle_time_ms == tree.get("ThrottleTimeMs", 0)
    assert read_partitions(response.partitions, api.response_fields) == expected_partitions(
        api, tree, api.response_fields
    )
    assert api.patch(response, {}) == b"head" + body
    response = api.parse_response(body, 0, version)
    answers = {}
    partitions = [p for topic in tree["Topics"] for p in topic["Partitions"]]
    for index, partition in enumerate(partitions):
        if data.draw(st.booleans()):
            answers[index] = data.draw(api.answers)
            for name in answers[index]._fields:
                if api.theirs(name) in partition:
                    partition[api.theirs(name)] = getattr(answers[index], name)
    patched = api.patch(response, answers)
    again = api.parse_response(bytes(patched), 0, version)
    assert read_partitions(again.partitions, api.response_fields) == expected_partitions(api, tree, api.response_fields)
    restored = api.patch(
        again,
        {i: type(a)(*(getattr(response.partitions[i], name) for name in a._fields)) for i, a in answers.items()},
    )
    assert restored == body


@every_api
@given(data=st.data(), more=st.binary(min_size=1))
def test_what_follows_a_request_is_ignored(api: Api, data: st.DataObject, more: bytes) -> None:
    version, (body, _) = draw_message(data, api, "Request")
    assert api.parse_request(body + more, 0, version) == api.parse_request(body, 0, version)
    version, (body, _) = draw_message(data, api, "Response")
    with pytest.raises(ProtocolError, match="the message ends at"):
        api.parse_response(body + more, 0, version)


@every_api
def test_versions_that_are_not_read(api: Api) -> None:
    for version in (api.versions.start - 1, api.versions.stop):
        for parse in (api.parse_request, api.parse_response):
            with pytest.raises(ProtocolError, match=f"version {version}"):
                parse(bytes(100), 0, version)
