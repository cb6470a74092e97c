from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.data_container import DataContainer
from kafka.protocol.schemas import StructField, load_json
from kafka.protocol.schemas.fields.codecs import EncodeBufferPool

from protocol.api_keys import ApiKey
from protocol.errors import LimitExceededError, ProtocolError, TruncatedError
from protocol.primitives import Buffer
from protocol.schema import compile_message, compile_schema
from tests.support.fakes.message_encoder import (
    Value,
    encode,
    is_flexible,
    message_names,
    message_schema,
    messages,
    struct_paths,
    versions_of,
)

KAFKA_PYTHON_LACKS = {
    "AlterShareGroupOffsetsResponse",
    "ConsumerGroupHeartbeatResponse",
    "DeleteShareGroupOffsetsResponse",
    "DescribeShareGroupOffsetsRequest",
    "DescribeShareGroupOffsetsResponse",
    "ShareAcknowledgeResponse",
    "ShareFetchResponse",
    "ShareGroupHeartbeatResponse",
    "StreamsGroupHeartbeatResponse",
}
"""The messages whose schemas are in this repository alone."""

every_message = pytest.mark.parametrize("name", message_names())
moderate = settings(max_examples=10)


def draw_message(data: st.DataObject, name: str, *, unknown_tags: bool = True) -> tuple[int, Value]:
    version = data.draw(st.sampled_from(versions_of(name)), "version")
    return version, data.draw(messages(name, version, unknown_tags=unknown_tags), "message")


def test_every_message_of_kafka_python_and_of_ours_is_here() -> None:
    assert len(message_names()) == 113
    assert set(message_names()) >= KAFKA_PYTHON_LACKS


@every_message
@moderate
@given(st.data())
def test_walk_reports_what_the_encoder_wrote(name: str, data: st.DataObject) -> None:
    version, value = draw_message(data, name)
    prefix = data.draw(st.binary(max_size=3), "what comes before the body")
    encoded = encode(name, version, value)
    plan = compile_schema(name, version)
    buf = prefix + bytes(encoded.data)

    spans = plan.walk(buf, len(prefix))
    assert [(path, kind, start - len(prefix), end - len(prefix)) for path, kind, start, end in spans] == encoded.spans
    assert plan.skip(buf, len(prefix)) == len(buf)
    assert plan.skip(memoryview(buf + b"next"), len(prefix)) == len(buf)

    covered = len(prefix)
    for span in spans:
        assert span.start == covered
        covered = span.end
    assert covered == len(buf)


@every_message
@moderate
@given(st.data())
def test_selectors_find_what_the_encoder_wrote(name: str, data: st.DataObject) -> None:
    version, value = draw_message(data, name)
    encoded = encode(name, version, value)
    plan = compile_schema(name, version)
    for path, names in struct_paths(name, version):
        if not names:
            continue
        chosen = data.draw(st.sets(st.sampled_from(names), min_size=1), "fields")
        selected = tuple(field for field in names if field in chosen)
        expected = [
            tuple(extents[field] for field in selected) for struct_at, extents in encoded.structs if struct_at == path
        ]
        assert plan.selector(path, selected)(encoded.data, 0).structs == expected


@every_message
@moderate
@given(st.data())
def test_kafka_python_reads_and_writes_the_same_bytes(name: str, data: st.DataObject) -> None:
    if name in KAFKA_PYTHON_LACKS:
        with pytest.raises(FileNotFoundError):
            load_json(name)
        return
    version, value = draw_message(data, name, unknown_tags=False)
    encoded = bytes(encode(name, version, value).data)
    flexible = is_flexible(name, version)
    codec = kafka_python_codec(name)
    decoded, end = codec.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=codec.data_class)(
        memoryview(encoded), 0
    )
    assert end == len(encoded)
    assert_same_value(decoded, value)

    with EncodeBufferPool.acquire() as out:
        codec.compiled_encode_into(version, compact=flexible, tagged=flexible)(decoded, out)
        again = out.result()
    spans = compile_schema(name, version).walk(again, 0)
    assert sum(end - start for _, _, start, end in spans) == len(again)


_codecs: dict[str, StructField] = {}


def kafka_python_codec(name: str) -> StructField:
    """Walks by the schema alone. The message classes patch some fields with names of their own."""
    if name not in _codecs:
        codec = StructField(load_json(name))
        codec.set_data_class(type(name, (DataContainer,), {"_struct": codec}))
        _codecs[name] = codec
    return _codecs[name]


def assert_same_value(decoded: object, value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            assert_same_value(getattr(decoded, StructField.underscore_name(key)), item)
    elif isinstance(value, list):
        assert isinstance(decoded, list)
        assert len(decoded) == len(value)
        for one, other in zip(decoded, value, strict=True):
            assert_same_value(one, other)
    elif isinstance(value, bytes):
        assert decoded is not None
        assert bytes(decoded) == value  # type: ignore[call-overload]  # records come as a memoryview
    else:
        assert decoded == value


@every_message
@moderate
@given(st.data())
def test_every_truncation_is_an_error(name: str, data: st.DataObject) -> None:
    version, value = draw_message(data, name)
    encoded = bytes(encode(name, version, value).data)
    plan = compile_schema(name, version)
    if encoded:
        cut = encoded[: data.draw(st.integers(0, len(encoded) - 1), "length")]
        for read in (plan.walk, plan.skip):
            with pytest.raises(ProtocolError):
                read(cut, 0)


@every_message
@moderate
@given(st.data())
def test_bad_bytes_raise_nothing_but_protocol_errors(name: str, data: st.DataObject) -> None:
    version, value = draw_message(data, name)
    damaged = bytearray(encode(name, version, value).data)
    for position, byte in data.draw(
        st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])), min_size=1, max_size=4)
    ):
        if position < len(damaged):
            damaged[position] = byte
    plan = compile_schema(name, version)
    for buf in (bytes(damaged), data.draw(st.binary(max_size=80), "noise")):
        selectors = [plan.selector(path, names) for path, names in struct_paths(name, version) if names]
        readers: list[Callable[[Buffer, int], object]] = [plan.walk, plan.skip, *selectors]
        for read in readers:
            try:
                read(buf, 0)
            except ProtocolError:
                continue


def test_versions_without_a_schema_are_refused() -> None:
    with pytest.raises(ProtocolError, match="FetchResponse has no version 3"):
        compile_message(ApiKey.FETCH, 3, "Response")
    with pytest.raises(ProtocolError, match="no schema of VoteRequest"):
        compile_message(ApiKey.VOTE, 0, "Request")
    with pytest.raises(ProtocolError, match="unknown API key 99"):
        compile_message(99, 0, "Request")


def test_plans_are_compiled_once() -> None:
    assert compile_message(ApiKey.FETCH, 12, "Response") is compile_message(ApiKey.FETCH, 12, "Response")


def test_a_field_that_a_version_lacks_cannot_be_selected() -> None:
    plan = compile_message(ApiKey.METADATA, 0, "Response")
    for path, names in ((("Brokers",), ("Rack",)), (("Nodes",), ("NodeId",)), (("Brokers", "Host"), ("x",))):
        with pytest.raises(ValueError, match=r"no field|a struct that|a primitive"):
            plan.selector(path, names)


def test_names_are_asked_for_in_wire_order() -> None:
    with pytest.raises(ValueError, match="fields"):
        compile_message(ApiKey.METADATA, 0, "Response").selector(("Brokers",), ("Host", "NodeId"))


def test_an_array_of_more_elements_than_kafka_takes() -> None:
    plan = compile_message(ApiKey.METADATA, 0, "Request")
    count = 1_000_001
    with pytest.raises(LimitExceededError):
        plan.skip(struct.pack(">i", count) + bytes(2 * count), 0)
    assert plan.skip(struct.pack(">i", count - 1) + bytes(2 * count), 0) == 4 + 2 * (count - 1)


def test_an_array_of_more_elements_than_bytes_remain() -> None:
    plan = compile_message(ApiKey.METADATA, 0, "Request")
    with pytest.raises(TruncatedError):
        plan.walk(struct.pack(">i", 1000) + bytes(999), 0)


def test_a_tagged_section_of_more_fields_than_kafka_takes() -> None:
    plan = compile_message(ApiKey.HEARTBEAT, 4, "Response")
    head = bytes(6)
    section = b"\x91\x4e" + b"".join(bytes((tag & 0x7F | 0x80, tag >> 7, 0)) for tag in range(128, 128 + 10_001))
    for read in (plan.walk, plan.skip):
        with pytest.raises(LimitExceededError):
            read(head + section, 0)


def test_null_where_the_schema_has_none() -> None:
    plan = compile_message(ApiKey.FIND_COORDINATOR, 0, "Request")
    assert plan.skip(bytes.fromhex("0000"), 0) == 2
    for read in (plan.walk, plan.skip):
        with pytest.raises(ProtocolError, match="null"):
            read(bytes.fromhex("ffff"), 0)


def test_a_known_tagged_field_that_is_not_as_long_as_it_says() -> None:
    plan = compile_message(ApiKey.CREATE_TOPICS, 5, "Response")
    body = (
        "00000000"  # throttle time
        "02"  # one topic
        "0274"  # "t"
        "0000"  # error code
        "00"  # error message: null
        "00000001 0001"  # partitions, replication factor
        "01"  # no configs
        "01 00 {size} 0005 {rest}"  # TopicConfigErrorCode, int16
        "00"
    )
    assert plan.skip(bytes.fromhex(body.format(size="02", rest="")), 0) == 23
    too_long = bytes.fromhex(body.format(size="03", rest="ff"))
    with pytest.raises(ProtocolError, match="TopicConfigErrorCode"):
        plan.walk(too_long, 0)


def test_a_nullable_struct() -> None:
    plan = compile_message(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, "Request")
    absent = bytes.fromhex("01 00000064 ff 00")
    present = bytes.fromhex("01 00000064 01 0274 00000003 00 00")
    assert [span.kind for span in plan.walk(absent, 0)] == ["length", "value", "length", "tag_count"]
    assert (("Cursor", "PartitionIndex"), "value", 8, 12) in plan.walk(present, 0)
    select = plan.selector(("Cursor",), ("PartitionIndex",))
    assert select(absent, 0).structs == []
    assert select(present, 0).structs == [((8, 12),)]


def test_a_schema_of_ours_has_the_shape_that_brokers_send() -> None:
    assert message_schema("ShareFetchResponse")["apiKey"] == ApiKey.SHARE_FETCH
    plan = compile_message(ApiKey.SHARE_ACKNOWLEDGE, 1, "Response")
    body = bytes.fromhex(
        "00000000 0000 00"  # throttle time, error code, null message
        "01"  # no topics
        "02 00000007 0274 00002384 00 00"  # one endpoint: node 7, "t", 9092, null rack
        "00"
    )
    assert plan.selector(("NodeEndpoints",), ("NodeId", "Host", "Port"))(body, 0).structs == [
        ((9, 13), (13, 15), (15, 19))
    ]
