from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import ApiKey
from protocol.apis.produce import peek_acks
from protocol.errors import ProtocolError
from protocol.header import build_request_header
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


@given(st.binary(max_size=40))
def test_bad_bytes_raise_nothing_but_protocol_errors(noise: bytes) -> None:
    try:
        peek_acks(b"\0\0" + noise)
    except ProtocolError:
        return
