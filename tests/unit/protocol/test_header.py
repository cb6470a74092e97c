from __future__ import annotations

import importlib.resources
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.api_keys import DECODED_APIS, FLEXIBLE_FROM, NEVER_FLEXIBLE, ApiKey, VersionRange, supported_versions
from protocol.errors import ProtocolError, TruncatedError
from protocol.header import (
    build_request_header,
    build_response_header,
    parse_request_head,
    parse_request_header,
    response_body_position,
    response_header_version,
)

api_keys = st.sampled_from(list(ApiKey))
versions = st.integers(0, 20)
correlation_ids = st.integers(-(2**31), 2**31 - 1)
client_ids = st.none() | st.text(max_size=20)


def test_metadata_v1_request() -> None:
    frame = bytes.fromhex(
        "0003"  # api key
        "0001"  # api version
        "0000002a"  # correlation id
        "0003 616263"  # client id, int16 length
        "00000000"  # body: no topics
    )
    assert parse_request_header(frame) == (3, 1, 42, "abc", 13)
    assert frame[:13] == build_request_header(3, 1, 42, "abc")


def test_metadata_v9_has_a_tagged_section_after_a_classic_client_id() -> None:
    frame = bytes.fromhex(
        "0003 0009 0000002a"
        "0003 616263"
        "02  05 01 ff  07 00"  # two tagged fields
        "00"
    )
    header = parse_request_header(frame)
    assert header.client_id == "abc"
    assert header.body_position == 19


def test_a_null_client_id() -> None:
    frame = bytes.fromhex("0012 0003 00000001 ffff 00 0474657374 0231 00")
    assert parse_request_header(frame) == (18, 3, 1, None, 11)


def test_a_client_id_that_is_not_utf8_is_replaced() -> None:
    assert parse_request_header(bytes.fromhex("0012 0000 00000001 0002 61ff")).client_id == "a\ufffd"


@given(api_keys, versions, correlation_ids, client_ids)
def test_request_headers_are_read_as_they_are_built(
    api_key: ApiKey, version: int, correlation_id: int, client_id: str | None
) -> None:
    header = build_request_header(api_key, version, correlation_id, client_id)
    assert parse_request_header(header + b"body") == (api_key, version, correlation_id, client_id, len(header))
    assert parse_request_head(header) == (api_key, version, correlation_id)


@given(api_keys, versions, correlation_ids)
def test_response_headers_are_read_as_they_are_built(api_key: ApiKey, version: int, correlation_id: int) -> None:
    header = build_response_header(api_key, version, correlation_id)
    assert int.from_bytes(header[:4], "big", signed=True) == correlation_id
    assert response_body_position(api_key, version, header + b"body") == len(header)


def test_unknown_tags_of_a_response_header_are_skipped() -> None:
    assert response_body_position(ApiKey.METADATA, 9, bytes.fromhex("00000001 01 09 03 aabbcc 00")) == 10


@given(versions)
def test_the_api_versions_response_header_never_has_tags(version: int) -> None:
    assert response_header_version(ApiKey.API_VERSIONS, version) == 0


@given(st.binary(max_size=30))
def test_arbitrary_bytes_raise_nothing_but_a_protocol_error(noise: bytes) -> None:
    try:
        header = parse_request_header(noise)
    except ProtocolError:
        return
    assert 8 < header.body_position <= len(noise)


def test_truncated_headers() -> None:
    whole = build_request_header(ApiKey.FETCH, 12, 1, "client")
    for length in range(len(whole)):
        with pytest.raises(TruncatedError):
            parse_request_header(whole[:length])
    for length in range(5):
        with pytest.raises(TruncatedError):
            response_body_position(ApiKey.FETCH, 12, bytes(length))


def test_an_unknown_api_key() -> None:
    with pytest.raises(ProtocolError, match="unknown API key 4"):
        parse_request_header(bytes.fromhex("0004 0000 00000000 ffff"))
    assert parse_request_head(bytes.fromhex("0004 0000 00000000 ffff")).api_key == 4


def test_flexible_versions_are_those_of_kafkas_schemas() -> None:
    seen = 0
    for resource in importlib.resources.files("kafka.protocol.schemas.resources").iterdir():
        if not resource.name.endswith("Request.json"):
            continue
        schema = json.loads(re.sub(r"(?m)^\s*//.*$", "", resource.read_text()))
        flexible = schema["flexibleVersions"]
        expected = NEVER_FLEXIBLE if flexible == "none" else int(flexible.rstrip("+"))
        key = ApiKey(schema["apiKey"])
        assert FLEXIBLE_FROM[key] == expected, key
        assert key.name.replace("_", "").lower() + "request" == schema["name"].lower()
        seen += 1
    assert seen == 52


def test_a_client_may_use_the_versions_that_the_proxy_decodes() -> None:
    assert supported_versions(ApiKey.FETCH) == (4, 18)
    assert 3 not in DECODED_APIS[ApiKey.FETCH]
    assert 18 in DECODED_APIS[ApiKey.FETCH]
    assert supported_versions(ApiKey.DESCRIBE_GROUPS) == VersionRange(0, 32767)
    assert supported_versions(ApiKey.SHARE_FETCH) == (1, 2)
    assert supported_versions(ApiKey.SHARE_GROUP_DESCRIBE) == VersionRange(0, 32767)
    assert supported_versions(ApiKey.VOTE) is None
    assert supported_versions(4) is None
    assert supported_versions(95) is None
