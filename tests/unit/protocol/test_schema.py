from __future__ import annotations

import struct
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.data_container import DataContainer
from kafka.protocol.schemas import StructField, load_json
from kafka.protocol.schemas.fields.codecs import EncodeBufferPool

from protocol.api_keys import ApiKey
from protocol.errors import LimitExceededError, ProtocolError, TruncatedError
from protocol.schema import compile_message, compile_schema
from tests.support.fakes.message_encoder import (
    Value,
    encode,
    is_flexible,
    message_names,
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


@cache
def kafka_python_codec(name: str) -> StructField:
    """Walks by the schema alone. The message classes patch some fields with names of their own."""
    codec = StructField(load_json(name))
    codec.set_data_class(type(name, (DataContainer,), {"_struct": codec}))
    return codec


def test_every_message_of_kafka_python_and_of_ours_is_here() -> None:
    assert len(message_names()) == 113
    assert set(message_names()) >= KAFKA_PYTHON_LACKS


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


def kafka_python_reads_and_writes_it_alike(name: str, version: int, value: Value, encoded: bytes) -> None:
    flexible, codec = is_flexible(name, version), kafka_python_codec(name)
    decoded, end = codec.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=codec.data_class)(
        memoryview(encoded), 0
    )
    assert end == len(encoded)
    assert_same_value(decoded, value)
    with EncodeBufferPool.acquire() as out:
        codec.compiled_encode_into(version, compact=flexible, tagged=flexible)(decoded, out)
        again = out.result()
    assert compile_schema(name, version).skip(again, 0) == len(again)


def check(name: str, data: st.DataObject) -> None:
    version, unknown_tags = data.draw(st.sampled_from(versions_of(name))), data.draw(st.booleans())
    value = data.draw(messages(name, version, unknown_tags=unknown_tags))
    encoded, plan = encode(name, version, value), compile_schema(name, version)
    prefix = data.draw(st.binary(max_size=3))
    buf = prefix + bytes(encoded.data)
    spans = plan.walk(buf, len(prefix))
    assert [(path, kind, start - len(prefix), end - len(prefix)) for path, kind, start, end in spans] == encoded.spans
    assert plan.skip(memoryview(buf + b"next"), len(prefix)) == len(buf)

    for path, names in struct_paths(name, version):
        chosen = data.draw(st.sets(st.sampled_from(names), min_size=1)) if names else set()
        selected = tuple(field for field in names if field in chosen)
        found = [tuple(extents[field] for field in selected) for at, extents in encoded.structs if at == path]
        assert not names or plan.selector(path, selected)(encoded.data, 0).structs == found

    if encoded.data:
        cut = bytes(encoded.data)[: data.draw(st.integers(0, len(encoded.data) - 1))]
        for read in (plan.walk, plan.skip):
            with pytest.raises(ProtocolError):
                read(cut, 0)
    if name not in KAFKA_PYTHON_LACKS and not unknown_tags:
        kafka_python_reads_and_writes_it_alike(name, version, value, bytes(encoded.data))


@pytest.mark.parametrize("letter", sorted({name[0] for name in message_names()}))
def test_any_message_is_walked_as_it_was_encoded(letter: str) -> None:
    """Its fields have the positions that the encoder gave them. Each part of it is an error."""
    for name in message_names():
        if name.startswith(letter):
            settings(max_examples=10)(given(name=st.just(name), data=st.data())(check))()


def test_versions_without_a_schema_are_refused() -> None:
    with pytest.raises(ProtocolError, match="FetchResponse has no version 3"):
        compile_message(ApiKey.FETCH, 3, "Response")
    with pytest.raises(ProtocolError, match="no schema of VoteRequest"):
        compile_message(ApiKey.VOTE, 0, "Request")
    with pytest.raises(ProtocolError, match="unknown API key 99"):
        compile_message(99, 0, "Request")


def test_a_field_that_a_version_lacks_cannot_be_selected() -> None:
    plan = compile_message(ApiKey.METADATA, 0, "Response")
    for path, names in ((("Brokers",), ("Rack",)), (("Nodes",), ("NodeId",)), (("Brokers", "Host"), ("x",))):
        with pytest.raises(ValueError, match=r"no field|a struct that|a primitive"):
            plan.selector(path, names)
    with pytest.raises(ValueError, match="fields"):
        plan.selector(("Brokers",), ("Host", "NodeId"))  # not in the order of the wire


def test_an_array_of_more_elements_than_kafka_takes_or_there_are_bytes() -> None:
    plan = compile_message(ApiKey.METADATA, 0, "Request")
    count = 1_000_001
    with pytest.raises(LimitExceededError):
        plan.skip(struct.pack(">i", count) + bytes(2 * count), 0)
    assert plan.skip(struct.pack(">i", count - 1) + bytes(2 * count), 0) == 4 + 2 * (count - 1)
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
