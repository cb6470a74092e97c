"""Requests that wait take little more memory than their bytes."""

from __future__ import annotations

import tracemalloc

from protocol.frame import REQUEST_HEAD_BYTES, FrameTracker
from proxy.wire.flow_control import READ_BUFFER_BYTES
from proxy.wire.request_reader import Stash
from tests.support.fakes.broker.wire import OPAQUE, frame, request


def test_short_requests_that_wait_take_little_more_than_their_bytes() -> None:
    one = frame(request(OPAQUE, 1, 1))
    read = one * (READ_BUFFER_BYTES // len(one))
    tracemalloc.start()
    try:
        stash = Stash(FrameTracker(REQUEST_HEAD_BYTES).feed(read))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stash) == READ_BUFFER_BYTES // len(one)
    assert held_bytes < 1.5 * READ_BUFFER_BYTES
