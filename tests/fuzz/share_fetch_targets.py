"""What must hold for any bytes in ShareFetch, whose large answers are walked by code of their own."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.apis.fetch.share_stream import FILLER_TAGS, StreamingShareFetchPatcher
from protocol.errors import ProtocolError
from protocol.header import response_body_position
from protocol.schema import compile_message
from protocol.wire_shape import FieldSpan
from tests.fuzz.wire_targets import is_by_schema

_VERSIONS = (1, 2)


def share_fetch_response(data: bytes) -> bool:
    """Streamed in any pieces it is the same: what the schema reads, of the same length, without a broker's address."""
    if len(data) < 1:
        return False
    version, payload = _VERSIONS[data[0] % 2], data[1:]
    whole = _stream(payload, len(payload))
    assert whole == _stream(payload, 1)
    assert whole == _stream(payload, 7)
    try:
        body = response_body_position(ApiKey.SHARE_FETCH, version, payload)
        is_message = is_by_schema(ApiKey.SHARE_FETCH, version, "Response", payload, body)
    except ProtocolError:
        is_message = False
    if not is_message:
        return False
    assert whole is not None, "what can be held can be streamed"
    assert len(whole) == len(payload)
    before, after = _spans(version, payload, body), _spans(version, whole, body)
    addresses = [span for span in before if span.path[0] == "NodeEndpoints" and len(span.path) > 1]
    if not addresses:
        assert whole == payload
        return True
    assert not any(span.path[0] == "NodeEndpoints" and len(span.path) > 1 for span in after)
    kept = [payload[span.start : span.end] for span in before if span.path[0] != "NodeEndpoints"]
    left = [whole[span.start : span.end] for span in after if span.path[0] != "NodeEndpoints"]
    assert left[:-1] == kept
    assert after[-1].path[0] in FILLER_TAGS
    return True


def _spans(version: int, payload: bytes, body: int) -> list[FieldSpan]:
    """But for the head of the body's own tagged section, whose path is empty."""
    spans = compile_message(ApiKey.SHARE_FETCH, version, "Response").walk(payload, body)
    return [span for span in spans if span.path]


def _stream(payload: bytes, step: int) -> bytes | None:
    """Returns None when the bytes cannot be read, or are incomplete."""
    patcher = StreamingShareFetchPatcher()
    out = bytearray()
    view = memoryview(payload)
    try:
        for start in range(0, len(payload), max(1, step)):
            for buffer in patcher.feed(view[start : start + step]):
                out += buffer
    except ProtocolError:
        return None
    return bytes(out) if patcher.is_complete else None
