from __future__ import annotations

import struct
from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.response import AbortedTransaction, parse_fetch_response
from protocol.apis.fetch.stream import (
    MAX_GROUP_BYTES,
    UNKNOWN_TAG,
    PartitionHead,
    PartitionPatch,
    StreamingFetchPatcher,
)
from protocol.apis.topic_reference import TopicReference
from protocol.errors import ProtocolError
from protocol.schema import compile_message
from tests.support.fakes.message_encoder import RECORDS, Message, encoded_messages
from tests.support.fakes.streaming import chunked, stream

FETCH = 1
OVERRIDES = {
    "HighWatermark": st.integers(-1, 2**62),
    "ErrorCode": st.sampled_from([0, 0, 1, 6]),
    "Records": RECORDS,
}
HEADER_TAGS = [b"\x00", b"\x01\x07\x03abc"]

patches = st.none() | st.builds(
    PartitionPatch,
    st.none() | st.integers(-1, 110),
    st.none() | st.integers(-1, 2**62),
    st.none() | st.integers(-1, 2**62),
    st.none() | st.integers(-1, 2**62),
)


class Scripted:
    """Answers with one patch per partition, and remembers what it was asked."""

    def __init__(self, answers: Sequence[PartitionPatch | None]) -> None:
        self.heads: list[PartitionHead] = []
        self._answers = iter(answers)

    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        self.heads.append(head)
        return next(self._answers, None)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[int, bytes, int]:
    """`(version, payload, body position)`."""
    version = draw(st.integers(4, 18))
    message: Message = draw(encoded_messages("FetchResponse", version, OVERRIDES))
    header = b"\x00\x00\x00\x2a"
    if version >= 12:
        header += draw(st.sampled_from(HEADER_TAGS))
    return version, header + message.payload, len(header)


def patched_while_held(
    version: int, payload: bytes, position: int, answers: list[PartitionPatch | None], session_id: int | None
) -> bytes:
    response = parse_fetch_response(payload, position, version)
    out = bytearray(payload)
    for partition, answer in zip(response.partitions, answers, strict=True):
        if answer is None:
            continue
        if answer.error_code is not None:
            struct.pack_into(">h", out, partition.start + 4, answer.error_code)
        if answer.high_watermark is not None:
            struct.pack_into(">q", out, partition.start + 6, answer.high_watermark)
        if answer.last_stable_offset is not None:
            struct.pack_into(">q", out, partition.start + 14, answer.last_stable_offset)
        if answer.log_start_offset is not None and version >= 5:
            struct.pack_into(">q", out, partition.start + 22, answer.log_start_offset)
    if session_id is not None and version >= 7:
        struct.pack_into(">i", out, position + 6, session_id)
    for span in compile_message(FETCH, version, "Response").walk(payload, position):
        if span.path == ("NodeEndpoints",) and span.kind == "tag":
            assert out[span.start] == 0
            out[span.start] = UNKNOWN_TAG
    return bytes(out)


@given(payloads(), st.data())
def test_streamed_in_any_chunks_as_held(message: tuple[int, bytes, int], data: st.DataObject) -> None:
    version, payload, position = message
    partitions = parse_fetch_response(payload, position, version).partitions
    answers = [data.draw(patches) for _ in partitions]
    session_id = data.draw(st.none() | st.integers(0, 9))
    expected = patched_while_held(version, payload, position, answers, session_id)
    heads = [(p.topic, *p[1:6]) for p in partitions]
    anywhere = data.draw(st.lists(st.integers(1, len(payload)), max_size=8))
    in_small_steps = list(range(1, len(payload), data.draw(st.sampled_from([1, 2, 7])) if len(payload) < 2000 else 61))
    for cuts in ([], anywhere, in_small_steps):
        script = Scripted(answers)
        patcher = StreamingFetchPatcher(version, script, session_id=session_id, hide_node_endpoints=True)
        assert stream(patcher, chunked(payload, cuts)) == expected
        assert patcher.is_complete
        assert script.heads == heads
        assert patcher.out_of_range == [head for head in script.heads if head.error_code == 1]


@given(payloads(), st.data())
def test_a_response_is_complete_at_its_last_byte(message: tuple[int, bytes, int], data: st.DataObject) -> None:
    version, payload, _ = message
    length = data.draw(st.integers(0, len(payload) - 1))
    patcher, complete = StreamingFetchPatcher(version, Scripted([])), list[bool]()
    for part in chunked(payload, [length]):
        patcher.feed(part)
        complete.append(patcher.is_complete)
    assert complete == [False, True]
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        patcher.feed(memoryview(b"\x00"))


@pytest.mark.parametrize("version", [4, 11, 12, 18])
@pytest.mark.parametrize("max_groups", [1, 3])
def test_a_response_may_be_fed_a_few_groups_at_a_time(version: int, max_groups: int) -> None:
    entries = [encode_partition(version, number, records=[b"records"] * (number % 2)) for number in range(5)]
    payload = b"".join(encode_response(version, 1, [(topic_of(version), entries)] * 2))
    patches = [PartitionPatch(log_start_offset=3)] * 10
    whole = stream(StreamingFetchPatcher(version, Scripted(patches)), iter([memoryview(payload)]))
    patcher, left, out = StreamingFetchPatcher(version, Scripted(patches)), memoryview(payload), b""
    while left:
        out += b"".join(map(bytes, patcher.feed(left, max_groups)))
        left = left[len(left) - patcher.untaken_bytes :]
    assert patcher.is_complete
    assert out == whole


@pytest.mark.parametrize("version", [4, 11, 12, 18])
def test_records_and_long_lists_leave_as_they_come(version: int) -> None:
    topic = topic_of(version)
    aborted = [AbortedTransaction(i, i) for i in range(2000)]
    records = bytes(range(256)) * 2000
    entry = encode_partition(version, 0, aborted_transactions=aborted, records=[records])
    payload = b"".join(encode_response(version, 1, [(topic, [entry, encode_partition(version, 1)])]))
    patcher = StreamingFetchPatcher(version, Scripted([PartitionPatch(log_start_offset=3)] * 2))
    sent = received = 0
    aliased = 0
    for chunk in chunked(payload, list(range(1000, len(payload), 1000))):
        buffers = patcher.feed(chunk)
        received += len(chunk)
        sent += sum(len(buffer) for buffer in buffers)
        assert received - sent < 60
        aliased += sum(len(b) for b in buffers if isinstance(b, memoryview) and b.obj is payload)
    assert sent == received
    assert aliased > len(payload) - 2000


def topic_of(version: int) -> TopicReference:
    return UUID(int=7) if version >= 13 else "t"


def test_a_node_endpoints_tag_stays_when_it_is_not_hidden() -> None:
    payload = b"".join(encode_response(16, 1, []))[:-1] + b"\x01\x00\x02\x01\x00"
    shown = StreamingFetchPatcher(16, Scripted([]))
    assert stream(shown, chunked(payload, [])) == payload
    hidden = StreamingFetchPatcher(16, Scripted([]), hide_node_endpoints=True)
    assert stream(hidden, chunked(payload, [])) == payload[:-4] + b"\x7f\x02\x01\x00"
    parse_fetch_response(payload[:-4] + b"\x7f\x02\x01\x00", 5, 16)


def test_a_group_without_end_is_refused() -> None:
    head = b"".join(encode_response(12, 1, [("t", [])]))[:-5]
    endless = head + b"\xff\xff\xff\x7f" + b"a" * (MAX_GROUP_BYTES + 100)
    with pytest.raises(ProtocolError, match="more than 40000"):
        StreamingFetchPatcher(12, Scripted([])).feed(memoryview(endless))
    patcher = StreamingFetchPatcher(12, Scripted([]))
    with pytest.raises(ProtocolError, match="more than 40000"):
        stream(patcher, chunked(endless, list(range(500, len(endless), 500))))


@pytest.mark.parametrize(
    ("start", "value", "complaint"),
    [
        (-4, -2, "records of -2 bytes"),
        (14, -2, "array length -2"),
        (14, 1_000_001, "1000001 elements"),
    ],
)
def test_a_length_that_cannot_be(start: int, value: int, complaint: str) -> None:
    payload = bytearray(b"".join(encode_response(11, 1, [("t", [encode_partition(11, 0)])])))
    start %= len(payload)
    payload[start : start + 4] = value.to_bytes(4, "big", signed=True)
    with pytest.raises(ProtocolError, match=complaint):
        StreamingFetchPatcher(11, Scripted([])).feed(memoryview(payload))


@pytest.mark.parametrize("version", [3, 19])
def test_versions_that_are_not_read(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"version {version}"):
        StreamingFetchPatcher(version, Scripted([]))
