from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.addresses import rewrite_addresses
from protocol.api_keys import ApiKey
from protocol.apis.produce import names_no_broker, peek_acks
from protocol.errors import ProtocolError
from protocol.header import build_request_header, build_response_header
from tests.support.fakes.message_encoder import encode, messages, versions_of


@pytest.mark.parametrize("version", versions_of("ProduceRequest"))
@settings(max_examples=30)
@given(data=st.data())
def test_acks_are_found_as_soon_as_they_are_there(version: int, data: Any) -> None:
    value = data.draw(messages("ProduceRequest", version))
    encoded = encode("ProduceRequest", version, value)
    header = build_request_header(ApiKey.PRODUCE, version, 1, data.draw(st.none() | st.just("client")))
    frame = header + bytes(encoded.data)
    acks_end = len(header) + encoded.structs[0][1]["Acks"][1]
    for length in range(acks_end):
        assert peek_acks(frame[:length]) is None
    assert peek_acks(frame[:acks_end]) == value["Acks"]
    assert peek_acks(memoryview(frame)) == value["Acks"]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_before_v3_acks_come_first(version: int) -> None:
    assert peek_acks(build_request_header(ApiKey.PRODUCE, version, 1, "c") + bytes.fromhex("0000 00007530")) == 0


def test_other_requests_have_no_acks() -> None:
    with pytest.raises(ProtocolError, match="Produce"):
        peek_acks(build_request_header(ApiKey.FETCH, 4, 1, None) + bytes(8))


def response(version: int, value: Any) -> bytes:
    return build_response_header(ApiKey.PRODUCE, version, 1) + bytes(encode("ProduceResponse", version, value).data)


@pytest.mark.parametrize("version", [10, 11, 12, 13])
@settings(max_examples=60)
@given(data=st.data())
def test_a_response_that_names_no_broker_needs_no_rewriting(version: int, data: Any) -> None:
    payload = response(version, data.draw(messages("ProduceResponse", version)))
    if names_no_broker(payload, version):
        assert rewrite_addresses(ApiKey.PRODUCE, version, payload, lambda _: ("elsewhere", 1)) is payload


def written(version: int, **changed: Any) -> bytes:
    partition = {
        "Index": 3,
        "ErrorCode": 0,
        "BaseOffset": 900,
        "LogAppendTimeMs": -1,
        "LogStartOffset": 5,
        "RecordErrors": [],
        "ErrorMessage": None,
    }
    topic = {"Name": "a-topic", "TopicId": UUID(int=7), "PartitionResponses": [partition, {**partition, **changed}]}
    return response(version, {"Responses": [topic, topic], "ThrottleTimeMs": 0})


@pytest.mark.parametrize("version", [10, 13])
def test_a_response_with_an_error_message_is_in_doubt(version: int) -> None:
    assert not names_no_broker(written(version, ErrorMessage="not the leader"), version)


@given(st.binary(max_size=60))
def test_malformed_responses_are_in_doubt_or_whole(noise: bytes) -> None:
    if names_no_broker(b"\0\0\0\1" + noise, 13):
        assert rewrite_addresses(ApiKey.PRODUCE, 13, b"\0\0\0\1" + noise, lambda _: ("elsewhere", 1))
