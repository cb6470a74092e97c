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
moderate = settings(max_examples=25)


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


def test_metadata_v9_is_compact_and_has_tagged_sections() -> None:
    response = bytes.fromhex(
        "0000002a 00"  # correlation id, tags of the header
        "00000000"  # throttle time
        "02"  # one broker
        "00000001 03 6231 00002384 03 7261 01 07 01 ff"  # node 1, "b1", 9092, rack "ra", an unknown tag 7
        "00"  # cluster id: null
        "00000001"  # controller id
        "01"  # no topics
        "80000000"  # cluster authorized operations
        "00"
    )
    assert rewrite_addresses(ApiKey.METADATA, 9, response, lambda node_id: ("p", 1)) == bytes.fromhex(
        "0000002a 00 00000000 0200000001 02 70 00000001 03 7261 01 07 01 ff00 00000001 01 80000000 00"
    )


def test_metadata_v12_with_a_broker_that_keeps_its_address() -> None:
    response = bytes.fromhex(
        "0000002a 00"
        "00000000"
        "03"  # two brokers
        "00000001 03 6231 00002384 00 00"
        "00000002 03 6232 00002384 00 00"
        "02 63"  # cluster id "c"
        "00000001"
        "02"  # one topic
        "0000 00 0123456789abcdef0123456789abcdef 00 01 80000000 00"  # named by id: null name
        "00"
    )
    only_2 = {2: ("b2", 19092)}
    rewritten = rewrite_addresses(ApiKey.METADATA, 12, response, only_2.get)
    assert rewritten == response.replace(
        bytes.fromhex("00000002 03 6232 00002384"), bytes.fromhex("00000002 03 6232 00004a94")
    )
    assert address_splices(ApiKey.METADATA, 12, response, only_2.get) == [(30, 34, bytes.fromhex("00004a94"))]


def test_find_coordinator_v3_with_an_error_stays() -> None:
    response = bytes.fromhex(
        "0000002a 00"
        "00000000"
        "000f 00"  # COORDINATOR_NOT_AVAILABLE, null message
        "ffffffff 01 ffffffff"  # node -1, "", -1
        "00"
    )
    assert rewrite_addresses(ApiKey.FIND_COORDINATOR, 3, response, proxy_address) is response


def test_find_coordinator_v4() -> None:
    response = bytes.fromhex(
        "0000002a 00"
        "00000000"
        "03"  # two coordinators
        "02 67 00000003 03 6233 00002384 0000 01 00"  # key "g", node 3, "b3", 9092, no error, ""
        "02 68 ffffffff 01 ffffffff 000f 00 00"  # key "h", COORDINATOR_NOT_AVAILABLE
        "00"
    )
    assert rewrite_addresses(ApiKey.FIND_COORDINATOR, 4, response, lambda node_id: ("p", node_id)) == bytes.fromhex(
        "0000002a 00 00000000 0302 67 00000003 02 70 00000003 0000 01 0002 68 ffffffff 01 ffffffff 000f 00 0000"
    )


def test_produce_v10_with_node_endpoints_resizes_the_tag() -> None:
    response = bytes.fromhex(
        "0000002a 00"
        "02 02 74"  # one topic, "t"
        "02"  # one partition
        "00000000 0006 ffffffffffffffff ffffffffffffffff ffffffffffffffff 01 00"  # NOT_LEADER_OR_FOLLOWER
        "01 00 09 00000007 00000001 00"  # CurrentLeader: node 7, epoch 1
        "00"  # tags of the topic
        "00000000"  # throttle time
        "02"  # two tagged fields
        "00 0e 02 00000007 03 6237 00002384 00 00"  # NodeEndpoints: node 7, "b7", 9092
        "05 01 ee"  # an unknown one
    )
    long_host = "h" * 120
    assert (
        rewrite_addresses(ApiKey.PRODUCE, 10, response, lambda node_id: (long_host, 9092))
        == bytes.fromhex(
            "0000002a 00"
            "02 02 74 02"
            "00000000 0006 ffffffffffffffff ffffffffffffffff ffffffffffffffff 01 00"
            "01 00 09 00000007 00000001 00"
            "00"
            "00000000"
            "02"
            "00 8401 02 00000007 79" + "68" * 120 + "00002384 00 00"  # 14 + 118 takes two bytes
            "05 01 ee"
        )
    )


def test_produce_without_node_endpoints_is_the_same_object() -> None:
    response = bytes.fromhex("0000002a 00 01 00000000 00")
    assert rewrite_addresses(ApiKey.PRODUCE, 10, response, proxy_address) is response


def test_an_endpoints_tag_that_comes_twice_is_refused() -> None:
    response = bytes.fromhex("0000002a 00 01 00000000 02") + 2 * bytes.fromhex(
        "00 0e 02 00000007 03 6237 00002384 00 00"
    )
    with pytest.raises(ProtocolError, match="twice"):
        rewrite_addresses(ApiKey.PRODUCE, 10, response, proxy_address)


@pytest.mark.parametrize(("endpoint_type", "rewritten"), [(1, True), (2, False)])
def test_describe_cluster_lists_brokers_or_controllers(endpoint_type: int, rewritten: bool) -> None:
    response = bytes.fromhex(
        "0000002a 00"
        "00000000 0000 00"  # throttle time, error code, null message
        f"{endpoint_type:02x}"
        "02 63 00000001"  # cluster id "c", controller 1
        "02 00000001 03 6231 00002384 00 00"  # node 1, "b1", 9092
        "80000000 00"
    )
    assert (rewrite_addresses(ApiKey.DESCRIBE_CLUSTER, 1, response, proxy_address) != response) is rewritten


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


@pytest.mark.parametrize(("api_key", "version"), CHANGED)
@moderate
@given(data=st.data())
def test_the_rewritten_response_is_the_one_that_names_the_proxy(api_key: int, version: int, data: Any) -> None:
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


@pytest.mark.parametrize(("api_key", "version"), CHANGED)
@moderate
@given(noise=st.binary(max_size=120))
def test_bad_bytes_raise_nothing_but_protocol_errors(api_key: int, version: int, noise: bytes) -> None:
    try:
        rewrite_addresses(api_key, version, noise, proxy_address)
    except ProtocolError:
        return
