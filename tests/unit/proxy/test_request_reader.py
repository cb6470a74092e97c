"""The stash gives back the requests that wait, as they came, and takes little more memory than their bytes."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from protocol.frame import LENGTH_BYTES, REQUEST_HEAD_BYTES, FrameTracker
from proxy.wire.flow_control import READ_BUFFER_BYTES
from proxy.wire.request_reader import Stash
from tests.support.fakes.broker.wire import OPAQUE, frame, request


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
def test_every_request_comes_back_once_and_in_order(sizes: list[int], data: st.DataObject) -> None:
    frames = [frame(bytes([number]) * size) for number, size in enumerate(sizes)]
    stream = b"".join(frames)
    cut = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(cut, len(stream)))
    tracker = FrameTracker(REQUEST_HEAD_BYTES)
    before = tracker.feed(stream[:cut])
    parts = tracker.feed(stream[cut:end])
    while parts and not parts[0].is_start:
        before.append(parts.pop(0))
    if not parts:
        return
    first = sum(part.is_start for part in before)
    stash = Stash(parts)
    assert stash.size_bytes == sum(len(part.data) for part in parts)
    popped = []
    while stash:
        popped.append(stash.first)
        stash.drop_first()
    assert not stash
    for number, part in enumerate(popped, first):
        whole = frames[number]
        is_last = number == first + len(popped) - 1
        assert part.is_start
        assert part.size == len(whole) - LENGTH_BYTES
        assert part.remaining == len(whole) - len(part.data)
        assert is_last or not part.remaining
        assert whole.startswith(bytes(part.data))
    rest = b"".join(bytes(part.data) for part in tracker.feed(stream[end:]))
    assert b"".join(bytes(part.data) for part in popped) + rest == b"".join(frames[first:])


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
