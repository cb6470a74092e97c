"""What must hold for any bytes in Fetch, whose messages are walked, scanned, streamed and rebuilt by separate code."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import parse_fetch_request, patch_fetch_request, topics_of
from protocol.apis.fetch.response import NODE_ENDPOINTS_TAG, FetchResponse, parse_fetch_response, rebuild_response
from protocol.apis.fetch.scan import plain_topics
from protocol.apis.fetch.stream import UNKNOWN_TAG, PartitionHead, PartitionPatch, StreamingFetchPatcher
from protocol.errors import ProtocolError
from protocol.header import response_body_position
from protocol.primitives import read_tag, read_tag_count
from protocol.steps import finished
from tests.fuzz.wire_targets import end_of_request, is_by_schema, prefixes_are_truncated

_VERSIONS = range(4, 19)


def fetch_request(data: bytes) -> bool:
    """A request that the schema accepts is read. A request for fewer partitions has the same fields for those."""
    if len(data) < 2:
        return False
    version, mask, body = _VERSIONS[data[0] % len(_VERSIONS)], data[1], data[2:]
    try:
        parsed = parse_fetch_request(body, 0, version)
    except ProtocolError as error:
        if "UTF-8" not in str(error) and is_by_schema(ApiKey.FETCH, version, "Request", body, 0):
            raise AssertionError("the schema takes it for a request") from error
        return False
    end = end_of_request(ApiKey.FETCH, version, body)
    prefixes_are_truncated(end, lambda size: parse_fetch_request(body[:size], 0, version))
    assert topics_of(body, 0, version) == [topic.topic for topic in parsed.topics]
    kept = [n for n in range(len(parsed.partitions)) if mask >> n % 8 & 1]
    fewer = parse_fetch_request(finished(parsed.with_only(set(kept))), 0, version)
    assert [one[:6] for one in fewer.partitions] == [parsed.partitions[n][:6] for n in kept]
    for number, one in zip(kept, fewer.partitions, strict=True):
        was = parsed.partitions[number]
        assert body[was.start : was.end] == bytes(fewer.payload[one.start : one.end])
    assert fewer[3:10] == parsed[3:10]
    assert not fewer.forgotten
    patched = bytearray(body)
    patch_fetch_request(patched, 0, version, max_wait_ms=1, min_bytes=2, max_bytes=3, session_id=4, session_epoch=5)
    again = parse_fetch_request(bytes(patched), 0, version)
    assert again[4:7] == (1, 2, 3)
    assert again[8:10] == ((4, 5) if version >= 7 else parsed[8:10])
    assert again.partitions == parsed.partitions
    return True


def _patch_of(number: int, mask: int) -> PartitionPatch | None:
    if not mask >> number % 4 & 1:
        return None
    return PartitionPatch(0, 1 << 33, None if mask & 16 else 1 << 34, None if mask & 32 else 77)


class _Patches:
    def __init__(self, mask: int) -> None:
        self.heads: list[PartitionHead] = []
        self._mask = mask

    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        self.heads.append(head)
        return _patch_of(len(self.heads) - 1, self._mask)


def fetch_response(data: bytes) -> bool:
    """Walked, scanned and by the schema it says the same; streamed in any pieces it is patched as when it is held."""
    if len(data) < 2:
        return False
    version, mask, payload = _VERSIONS[data[0] % len(_VERSIONS)], data[1], data[2:]
    response: FetchResponse | None = None
    try:
        body = response_body_position(ApiKey.FETCH, version, payload)
    except ProtocolError:
        body = len(payload) + 1
    plain = plain_topics(payload, body, version)
    try:
        response = parse_fetch_response(payload, body, version)
        held = _patched_while_held(response, mask)
    except ProtocolError as error:
        is_message = body <= len(payload) and is_by_schema(ApiKey.FETCH, version, "Response", payload, body)
        if is_message and "UTF-8" not in str(error):
            raise AssertionError("the schema takes it for a response") from error
    whole = _stream(payload, version, mask, len(payload))
    assert whole == _stream(payload, version, mask, 1)
    assert whole == _stream(payload, version, mask, 7)
    if response is None:
        assert plain is None
        assert whole is None or not whole[2]
        return False
    assert whole is not None, "what can be held can be streamed"
    out, heads, is_complete = whole
    assert is_complete
    assert out == held
    assert heads == [(one.topic, *one[1:6]) for one in response.partitions]
    if plain is not None:
        assert not any(one.error_code for one in response.partitions)
        assert {one.topic for one in response.partitions} <= set(plain)
    for one in response.partitions:
        response.aborted_transactions(one)
        assert len(response.records(one)) == one.records_bytes
    entries = {n: [payload[one.start : one.end]] for n, one in enumerate(response.partitions)}
    assert b"".join(rebuild_response(response, entries=entries)) == payload
    prefixes_are_truncated(len(payload), lambda size: _parse_prefix(payload[:size], version))
    return True


def _parse_prefix(payload: bytes, version: int) -> FetchResponse:
    return parse_fetch_response(payload, response_body_position(ApiKey.FETCH, version, payload), version)


def _stream(payload: bytes, version: int, mask: int, step: int) -> tuple[bytes, list[PartitionHead], bool] | None:
    """Returns None when the bytes cannot be read."""
    patches = _Patches(mask)
    patcher = StreamingFetchPatcher(
        version, patches, session_id=0 if mask & 64 else None, hide_node_endpoints=bool(mask & 128)
    )
    out = bytearray()
    view = memoryview(payload)
    try:
        for start in range(0, len(payload), max(1, step)):
            for buffer in patcher.feed(view[start : start + step]):
                out += buffer
    except ProtocolError:
        return None
    assert not patcher.is_complete or len(out) == len(payload)
    return bytes(out), patches.heads, patcher.is_complete


def _patched_while_held(response: FetchResponse, mask: int) -> bytes:
    out = bytearray(response.payload)
    for number, partition in enumerate(response.partitions):
        patch = _patch_of(number, mask)
        if patch is None:
            continue
        for at, size, value in (
            (4, 2, patch.error_code),
            (6, 8, patch.high_watermark),
            (14, 8, patch.last_stable_offset),
            (22, 8, patch.log_start_offset if response.version >= 5 else None),
        ):
            if value is not None:
                start = partition.start + at
                out[start : start + size] = value.to_bytes(size, "big", signed=True)
    if mask & 64 and response.version >= 7:
        out[response.body_position + 6 : response.body_position + 10] = bytes(4)
    if mask & 128 and response.version >= 16:
        _hide_node_endpoints(response, out)
    return bytes(out)


def _hide_node_endpoints(response: FetchResponse, out: bytearray) -> None:
    count, pos = read_tag_count(response.payload, response.tags_position)
    for _ in range(count):
        start = pos
        tag, _, _, pos = read_tag(response.payload, pos)
        if tag == NODE_ENDPOINTS_TAG:
            out[start] |= UNKNOWN_TAG
