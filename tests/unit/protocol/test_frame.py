from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import FrameSizeError, HttpError, TlsHandshakeError
from protocol.frame import FramePart, FrameTracker, frame_length

payloads = st.lists(st.binary(max_size=40), max_size=8)


def wire(frames: list[bytes]) -> bytes:
    return b"".join(frame_length(frame) + frame for frame in frames)


@st.composite
def split_stream(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    frames = draw(payloads)
    stream = wire(frames)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    borders = [0, *cuts, len(stream)]
    return frames, [stream[a:b] for a, b in itertools.pairwise(borders)]


@given(split_stream(), st.sampled_from([0, 4, 8, 30]))
def test_tracker_parts_are_the_stream_and_begin_with_the_head(
    case: tuple[list[bytes], list[bytes]], head_bytes: int
) -> None:
    frames, chunks = case
    tracker = FrameTracker(head_bytes)
    parts = [part for chunk in chunks for part in tracker.feed(chunk)]
    assert b"".join(part.data for part in parts) == wire(frames)
    assert all(parts_of.data for parts_of in parts)
    assert tracker.is_between_frames

    seen: list[list[FramePart]] = []
    for part in parts:
        if part.is_start:
            seen.append([])
        seen[-1].append(part)
    assert len(seen) == len(frames)
    for frame, frame_parts in zip(frames, seen, strict=True):
        assert len(frame_parts[0].data) >= 4 + min(head_bytes, len(frame))
        assert [part.size for part in frame_parts] == [len(frame)] * len(frame_parts)
        left = 4 + len(frame)
        for part in frame_parts:
            left -= len(part.data)
            assert part.remaining == left
        assert left == 0


def test_a_body_chunk_is_passed_on_without_a_copy() -> None:
    tracker = FrameTracker(4)
    tracker.feed(struct.pack(">ii", 1000, 7))
    chunk = bytearray(100)
    (part,) = tracker.feed(chunk)
    assert part.data.obj is chunk
    assert (part.is_start, part.remaining, part.size) == (False, 896, 1000)
    assert not tracker.is_between_frames


@pytest.mark.parametrize("size", [-1, -(2**31), 101, 2**31 - 1])
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_length_that_is_negative_or_above_the_limit_is_refused(size: int, cut: int) -> None:
    prefix = struct.pack(">i", size)
    tracker = FrameTracker(4, 100)
    with pytest.raises(FrameSizeError):
        tracker.feed(prefix[:cut]), tracker.feed(prefix[cut:])


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
@pytest.mark.parametrize(
    ("begin", "error"),
    [
        (bytes.fromhex("16030102000100 01fc0303"), TlsHandshakeError),
        (bytes.fromhex("15030300020250"), TlsHandshakeError),
        (b"GET /metrics HTTP/1.1\r\n", HttpError),
        (b"HTTP/1.1 400 Bad Request\r\n", HttpError),
    ],
    ids=["client hello", "alert", "request", "answer"],
)
def test_tls_and_http_are_told_apart(begin: bytes, error: type[FrameSizeError], cut: int) -> None:
    tracker = FrameTracker(8)
    with pytest.raises(error):
        tracker.feed(begin[:cut]), tracker.feed(begin[cut:])


def test_a_frame_above_the_limit_names_the_setting() -> None:
    (taken,) = FrameTracker(4, 100).feed(wire([b"x" * 100]))
    assert taken.size == 100
    with pytest.raises(FrameSizeError, match=r"a frame of 101 bytes, above the limit of 100 bytes \(max\.bytes\)"):
        FrameTracker(4, 100, "max.bytes").feed(wire([b"x" * 101]))


def test_a_later_frame_may_have_a_length_that_looks_like_tls() -> None:
    tracker = FrameTracker(4)
    tracker.feed(wire([b"abcd"]))
    (part,) = tracker.feed(bytes.fromhex("16030100") + b"abcd")
    assert part.size == 0x16030100
