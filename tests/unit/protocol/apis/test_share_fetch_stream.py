from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.api_keys import ApiKey
from protocol.apis.fetch.share_stream import FILLER_TAGS, MAX_GROUP_BYTES, StreamingShareFetchPatcher
from protocol.errors import LimitExceededError, ProtocolError
from protocol.primitives import read_tag, read_tag_count
from protocol.schema import compile_message
from tests.support.fakes.message_encoder import RECORDS, Message, encoded_messages
from tests.support.fakes.streaming import chunked, stream

HEADERS = [b"\x00\x00\x00\x2a\x00", b"\x00\x00\x00\x2a\x01\x07\x03abc"]
OVERRIDES = {
    "Records": RECORDS.filter(lambda records: records is not None),
    "[]NodeEndpoints": st.integers(0, 12),
    # Every length of the filler, and so of its own length, comes up.
    "Host": st.integers(0, 140).map(lambda length: "h" * length),
}
NO_LEADER = bytes.fromhex("ffffffff ffffffff 00")


@st.composite
def payloads(draw: st.DrawFn) -> tuple[int, bytes, int]:
    """`(version, payload, body position)`."""
    version = draw(st.integers(1, 2))
    message: Message = draw(encoded_messages("ShareFetchResponse", version, OVERRIDES))
    header = draw(st.sampled_from(HEADERS))
    return version, header + message.payload, len(header)


def without_endpoints(version: int, payload: bytes, body: int) -> tuple[bytes, list[tuple[int, bytes]], int]:
    """Returns the bytes before the endpoints, the tagged fields after them, and the number of endpoints."""
    plan = compile_message(ApiKey.SHARE_FETCH, version, "Response")
    spans = plan.walk(payload, body)
    assert plan.skip(payload, body) == len(payload)
    endpoints = [span for span in spans if span.path[:1] == ("NodeEndpoints",)]
    (tags_at,) = (span.start for span in spans if span.kind == "tag_count" and span.path == ())
    count, pos = read_tag_count(payload, tags_at)
    tags = []
    for _ in range(count):
        tag, _, start, pos = read_tag(payload, pos)
        tags.append((tag, payload[start:pos]))
    return payload[: endpoints[0].start], tags, sum(span.path[-1] == "NodeId" for span in endpoints)


@given(payloads(), st.data())
def test_only_the_endpoints_go_whatever_the_chunks(message: tuple[int, bytes, int], data: st.DataObject) -> None:
    version, payload, body = message
    head, tags, endpoints = without_endpoints(version, payload, body)
    anywhere = data.draw(st.lists(st.integers(1, len(payload)), max_size=8))
    in_small_steps = list(range(1, len(payload), data.draw(st.sampled_from([1, 2, 7])) if len(payload) < 2000 else 61))
    for cuts in ([], anywhere, in_small_steps):
        patcher = StreamingShareFetchPatcher()
        streamed = stream(patcher, chunked(payload, cuts))
        assert patcher.is_complete
        assert len(streamed) == len(payload)
        if not endpoints:
            assert streamed == payload
            continue
        new_head, new_tags, left = without_endpoints(version, streamed, body)
        assert (new_head, left) == (head, 0)
        assert new_tags[:-1] == tags
        assert new_tags[-1][0] in FILLER_TAGS
        assert not any(new_tags[-1][1])


def head_of_a_partition(records: bytes) -> bytes:
    top = HEADERS[0] + bytes.fromhex("00000000 0000 00 00007530 02") + bytes(16) + b"\x02"
    return top + bytes.fromhex("00000000 0000 00 0000 00") + NO_LEADER + records


def test_records_leave_as_they_arrive() -> None:
    patcher = StreamingShareFetchPatcher()
    head = head_of_a_partition(bytes.fromhex("81808004"))  # records of 8 MiB
    assert stream(patcher, iter([memoryview(head)])) == head
    chunk = memoryview(bytes(1 << 20))
    for _ in range(8):
        (buffer,) = patcher.feed(chunk)
        assert isinstance(buffer, memoryview)
        assert len(buffer) == len(chunk)
    tail = bytes.fromhex("01 00 00 01 00")
    assert stream(patcher, iter([memoryview(tail)])) == tail
    assert patcher.is_complete


def test_the_held_part_of_an_answer_is_bounded() -> None:
    patcher = StreamingShareFetchPatcher()
    patcher.feed(memoryview(head_of_a_partition(b"\x01") + bytes.fromhex("01 00 00")))
    a_million_endpoints = bytes.fromhex("c0843d")
    with pytest.raises(ProtocolError, match=f"more than {MAX_GROUP_BYTES} bytes in a ShareFetch response"):
        patcher.feed(memoryview(a_million_endpoints + bytes(MAX_GROUP_BYTES)))


def test_a_count_beyond_every_limit() -> None:
    with pytest.raises(LimitExceededError):
        StreamingShareFetchPatcher().feed(memoryview(HEADERS[0] + bytes.fromhex("00000000 0000 00 00007530 ffffff7f")))
