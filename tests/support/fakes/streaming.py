"""Sends a response in pieces through a streaming patcher, for any API."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from protocol.apis.fetch.response_stream import StreamedResponse


def chunked(payload: bytes, cuts: list[int]) -> Iterator[memoryview]:
    positions = [0, *sorted(cut for cut in cuts if cut < len(payload)), len(payload)]
    view = memoryview(payload)
    for start, end in itertools.pairwise(positions):
        yield view[start:end]


def stream(patcher: StreamedResponse, chunks: Iterator[memoryview]) -> bytes:
    return b"".join(bytes(buffer) for chunk in chunks for buffer in patcher.feed(chunk))
