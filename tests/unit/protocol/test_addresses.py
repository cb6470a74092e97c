from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.addresses import ADDRESS_FIELDS, Address, address_splices, carries_addresses, rewrite_addresses
from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.errors import ProtocolError
from protocol.header import build_response_header
from protocol.message_schema import message_name
from tests.support.fakes.message_encoder import Value, encode, messages, versions_of

VERSIONS = [
    (api_key, version) for api_key in ADDRESS_FIELDS for version in versions_of(message_name(api_key, "Response"))
]
CHANGED = [entry for entry in VERSIONS if carries_addresses(*entry)]


def proxy_address(node_id: int) -> Address | None:
    return "proxy.example", 19000 + node_id


def test_metadata_v0() -> None:
    response = bytes.fromhex(
        "0000002a"  # correlation id
        "00000002"  # brokers
        "00000001 0002 6231 00002384"  # node 1, "b1", 9092
        "00000002 0002 6232 00002385"  # node 2, "b2", 9093
        "00000001"  # topics
        "0000 0001 74 00000000"  # "t" without partitions
    )
    assert rewrite_addresses(ApiKey.METADATA, 0, response, proxy_address) == bytes.fromhex(
        "0000002a"
        "00000002"
        "00000001 000d 70726f78792e6578616d706c65 00004a39"  # "proxy.example", 19001
        "00000002 000d 70726f78792e6578616d706c65 00004a3a"
        "00000001"
        "0000 0001 74 00000000"
    )


def test_an_endpoints_tag_that_comes_twice_is_refused() -> None:
    response = bytes.fromhex("0000002a 00 01 00000000 02") + 2 * bytes.fromhex(
        "00 0e 02 00000007 03 6237 00002384 00 00"
    )
    with pytest.raises(ProtocolError, match="twice"):
        rewrite_addresses(ApiKey.PRODUCE, 10, response, proxy_address)


def test_apis_without_addresses_are_not_looked_at() -> None:
    junk = b"\xff"
    assert rewrite_addresses(ApiKey.JOIN_GROUP, 5, junk, proxy_address) is junk
    assert rewrite_addresses(ApiKey.PRODUCE, 9, junk, proxy_address) is junk
    assert rewrite_addresses(ApiKey.FETCH, 15, junk, proxy_address) is junk


def test_every_decoded_version_of_these_apis_can_be_rewritten() -> None:
    for api_key in ADDRESS_FIELDS:
        versions = DECODED_APIS[api_key]
        for version in range(versions.min_version, versions.max_version + 1):
            assert not carries_addresses(api_key, version) or (api_key, version) in CHANGED


@st.composite
def responses(draw: st.DrawFn, api_key: int, version: int) -> Value:
    """Node ids are small, so that some are known and some are errors."""
    value: Value = draw(messages(message_name(api_key, "Response"), version))
    for entry in address_entries(api_key, version, value):
        entry[node_id_field(api_key)] = draw(st.integers(-1, 4))
    if "EndpointType" in value:
        value["EndpointType"] = draw(st.sampled_from([1, 2]))
    return value


def node_id_field(api_key: int) -> str:
    return "BrokerId" if api_key == ApiKey.DESCRIBE_CLUSTER else "NodeId"


def address_entries(api_key: int, version: int, value: Value) -> list[Value]:
    if api_key == ApiKey.FIND_COORDINATOR and version < 4:
        return [value]
    lists: dict[int, str] = {
        ApiKey.FIND_COORDINATOR: "Coordinators",
        ApiKey.METADATA: "Brokers",
        ApiKey.DESCRIBE_CLUSTER: "Brokers",
    }
    entries: list[Value] = value.get(lists.get(api_key, "NodeEndpoints"), [])
    return entries


@settings(max_examples=400)
@given(st.sampled_from(CHANGED), st.data())
def test_the_rewritten_response_is_the_one_that_names_the_proxy(case: tuple[int, int], data: Any) -> None:
    api_key, version = case
    value = data.draw(responses(api_key, version))
    known = data.draw(
        st.dictionaries(st.integers(0, 4), st.tuples(st.sampled_from(["", "p", "h" * 130]), st.integers(0, 65535)))
    )
    expected = copy.deepcopy(value)
    if value.get("EndpointType", 1) == 1:
        for entry in address_entries(api_key, version, expected):
            if entry[node_id_field(api_key)] in known:
                entry["Host"], entry["Port"] = known[entry[node_id_field(api_key)]]
    name = message_name(api_key, "Response")
    header = build_response_header(api_key, version, 7)
    payload = header + bytes(encode(name, version, value).data)

    rewritten = rewrite_addresses(api_key, version, payload, known.get)
    assert rewritten == header + bytes(encode(name, version, expected).data)
    assert rewrite_addresses(api_key, version, rewritten, known.get) is rewritten
    splices = address_splices(api_key, version, payload, known.get)
    assert (splices == []) == (rewritten == payload)
