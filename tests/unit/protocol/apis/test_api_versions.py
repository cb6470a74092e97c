from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import DECODED_APIS, HIDDEN_APIS, ApiKey
from protocol.apis.api_versions import intersect_api_versions, unsupported_version_response
from protocol.errors import ProtocolError
from tests.support.fakes.message_encoder import Value, encode, messages, versions_of

NAME = "ApiVersionsResponse"


def test_v3() -> None:
    response = bytes.fromhex(
        "0000002a"  # correlation id; never tags
        "0000"  # no error
        "07"  # six keys
        "0000 0000 000d 00"  # Produce 0-13
        "0001 0004 0013 00"  # Fetch 4-19
        "0012 0000 0005 01 09 01 ff"  # ApiVersions 0-5, with a tagged field
        "0034 0000 0002 00"  # Vote
        "004e 0001 0003 00"  # ShareFetch 1-3
        "005f 0000 0000 00"  # a key from the future
        "00000000"  # throttle time
        "02"  # tagged fields
        "00 0b 02 05 676d 6574 0001 0002 00 "  # SupportedFeatures
        "01 08 0000000000000007"  # FinalizedFeaturesEpoch
    )
    assert intersect_api_versions(response, 3) == bytes.fromhex(
        "0000002a"
        "0000"
        "05"
        "0000 0000 000d 00"
        "0001 0004 0012 00"
        "0012 0000 0004 01 09 01 ff"
        "004e 0001 0002 00"
        "00000000"
        "02"
        "00 0b 02 05 676d 6574 0001 0002 00 "
        "01 08 0000000000000007"
    )


def test_a_broker_that_does_not_know_the_version_answers_as_version_0() -> None:
    response = bytes.fromhex("0000002a 0023 00000001 0012 0000 0005")
    assert intersect_api_versions(response, 4) == bytes.fromhex("0000002a 0023 00000001 0012 0000 0004")


def test_the_answer_to_a_version_beyond_ours() -> None:
    assert unsupported_version_response(42) == bytes.fromhex(
        "0000002a"  # correlation id
        "0023"  # UNSUPPORTED_VERSION
        "00000001"
        "0012 0000 0004"  # ApiVersions 0-4
    )


@pytest.mark.parametrize("version", versions_of(NAME))
@settings(max_examples=50)
@given(data=st.data())
def test_only_the_entries_change(version: int, data: Any) -> None:
    value: Value = data.draw(messages(NAME, version))
    value["ErrorCode"] = 0
    for entry in value["ApiKeys"]:
        entry["ApiKey"] = data.draw(st.integers(0, 100))
        entry["MinVersion"] = data.draw(st.integers(0, 6))
        entry["MaxVersion"] = data.draw(st.integers(0, 30))
    expected = copy.deepcopy(value)
    expected["ApiKeys"] = [entry for entry in map(cut, expected["ApiKeys"]) if entry is not None]
    before, after = (b"\0\0\0\x2a" + bytes(encode(NAME, version, body).data) for body in (value, expected))
    assert intersect_api_versions(before, version) == after


def cut(entry: Value) -> Value | None:
    if entry["ApiKey"] not in set(ApiKey) - HIDDEN_APIS:
        return None
    if entry["ApiKey"] in DECODED_APIS:
        entry["MinVersion"] = max(entry["MinVersion"], DECODED_APIS[entry["ApiKey"]].min_version)
        entry["MaxVersion"] = min(entry["MaxVersion"], DECODED_APIS[entry["ApiKey"]].max_version)
    return entry if entry["MinVersion"] <= entry["MaxVersion"] else None


@given(st.binary(max_size=60), st.integers(0, 4))
def test_bad_bytes_raise_nothing_but_protocol_errors(noise: bytes, version: int) -> None:
    try:
        intersect_api_versions(noise, version)
    except ProtocolError:
        return
