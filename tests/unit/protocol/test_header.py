from __future__ import annotations

import importlib.resources
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.api_keys import DECODED_APIS, FLEXIBLE_FROM, NEVER_FLEXIBLE, ApiKey, VersionRange, supported_versions
from protocol.errors import ProtocolError
from protocol.header import (
    build_request_header,
    build_response_header,
    parse_request_head,
    parse_request_header,
    response_body_position,
)

api_keys = st.sampled_from(list(ApiKey))
versions = st.integers(0, 20)
correlation_ids = st.integers(-(2**31), 2**31 - 1)


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


@pytest.mark.parametrize(
    ("frame", "client_id", "body_position"),
    [
        ("0003 0009 0000002a 0003 616263 02 05 01 ff 07 00 00", "abc", 19),  # two tagged fields
        ("0012 0003 00000001 ffff 00 0474657374 0231 00", None, 11),
        ("0012 0000 00000001 0002 61ff", "a\ufffd", 12),  # no UTF-8
    ],
)
def test_a_client_id_and_where_the_body_begins(frame: str, client_id: str | None, body_position: int) -> None:
    assert parse_request_header(bytes.fromhex(frame))[3:] == (client_id, body_position)


@given(api_keys, versions, correlation_ids)
def test_response_headers_are_read_as_they_are_built(api_key: ApiKey, version: int, correlation_id: int) -> None:
    header = build_response_header(api_key, version, correlation_id)
    assert int.from_bytes(header[:4], "big", signed=True) == correlation_id
    assert response_body_position(api_key, version, header + b"body") == len(header)


def test_unknown_tags_of_a_response_header_are_skipped() -> None:
    assert response_body_position(ApiKey.METADATA, 9, bytes.fromhex("00000001 01 09 03 aabbcc 00")) == 10


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
