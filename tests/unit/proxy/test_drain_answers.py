"""The empty Fetch of a drain is one that kafka-python's own decoder takes for good, in every version."""

from __future__ import annotations

import pytest
from kafka.protocol.consumer import FetchResponse

from protocol.api_keys import ApiKey
from protocol.header import response_body_position
from proxy.handlers.drain_answers import empty_fetch


@pytest.mark.parametrize("version", [4, 12, 18])
def test_an_empty_fetch_is_throttled_and_sessionless(version: int) -> None:
    payload = b"".join(empty_fetch(version, 77))
    assert int.from_bytes(payload[:4], "big", signed=True) == 77
    body = payload[response_body_position(ApiKey.FETCH, version, payload) :]
    decoded = FetchResponse.decode(body, version=version)
    assert decoded.throttle_time_ms == 1
    assert list(decoded.responses) == []
    if version >= 7:
        assert (decoded.error_code, decoded.session_id) == (0, 0)
