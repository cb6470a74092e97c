"""Sends a response in pieces through a streaming patcher, for any API."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from protocol.apis.fetch.response_stream import StreamedResponse
from protocol.errors import ProtocolError


def chunked(payload: bytes, cuts: list[int]) -> Iterator[memoryview]:
    positions = [0, *sorted(cut for cut in cuts if cut < len(payload)), len(payload)]
    view = memoryview(payload)
    for start, end in itertools.pairwise(positions):
        yield view[start:end]


def stream(patcher: StreamedResponse, chunks: Iterator[memoryview]) -> bytes:
    return b"".join(bytes(buffer) for chunk in chunks for buffer in patcher.feed(chunk))


def completes_at_the_last_byte(patcher: StreamedResponse, payload: bytes, length: int) -> None:
    """Checks that the response is complete only at its last byte. The first of two pieces has `length` bytes."""
    complete = []
    for part in (memoryview(payload)[:length], memoryview(payload)[length:]):
        patcher.feed(part)
        complete.append(patcher.is_complete)
    assert complete == [False, True]
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        patcher.feed(memoryview(b"\x00"))


def damaged(payload: bytes, data: st.DataObject) -> bytes:
    """Returns the payload with up to four bytes changed. The correlation id stays."""
    found = bytearray(payload)
    for position in data.draw(st.lists(st.integers(4, len(payload) - 1), min_size=1, max_size=4)):
        found[position] = data.draw(st.integers(0, 255))
    return bytes(found)
