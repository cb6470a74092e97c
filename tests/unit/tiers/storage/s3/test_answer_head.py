"""The head of an answer of HTTP/1.1, and the chunks of an error document."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.storage.s3.answer_head import AnswerHead, ContentRange, MalformedAnswerError, dechunked, parse_head


def head_of(*lines: str) -> AnswerHead:
    return parse_head("\r\n".join(lines).encode())


def test_a_range_with_its_length_and_its_place() -> None:
    head = head_of("HTTP/1.1 206 Partial Content", "content-length: 5", "Content-Range: bytes 2-6/10", "ETag: x")
    assert head == AnswerHead(206, length=5, is_chunked=False, content_range=ContentRange(2, 6, 10), stays_open=True)
    unknown = head_of("HTTP/1.1 404 ", "Content-Length: 7", "Content-Length: 7", "Content-Range: bytes */10")
    assert unknown == AnswerHead(404, length=7, is_chunked=False, content_range=None, stays_open=True)
    chunked = head_of("HTTP/1.1 503 x", "Content-Length: 5", "Transfer-Encoding: chunked")
    assert chunked == AnswerHead(503, length=None, is_chunked=True, content_range=None, stays_open=True)


@pytest.mark.parametrize(
    ("line", "said", "stays_open"),
    [
        ("HTTP/1.1 200 OK", "X: y", True),
        ("HTTP/1.1 200 OK", "Connection: Close", False),
        ("HTTP/1.1 200 OK", "Connection: upgrade , close", False),
        ("HTTP/1.0 200 OK", "X: y", False),
        ("HTTP/1.0 200 OK", "Connection: keep-alive", True),
    ],
)
def test_whether_the_connection_stays_open(line: str, said: str, stays_open: bool) -> None:
    assert head_of(line, said).stays_open is stays_open


def test_answers_without_a_body_and_interim_answers() -> None:
    assert head_of("HTTP/1.1 204").has_no_body
    assert head_of("HTTP/1.1 103 Early Hints").is_interim
    assert not head_of("HTTP/1.1 101 Switching Protocols").is_interim


@pytest.mark.parametrize(
    "lines",
    [
        ("nonsense",),
        ("HTTP/2 200 OK",),
        ("HTTP/1.1 20 OK",),
        ("HTTP/1.1 200 OK", "no colon"),
        ("HTTP/1.1 200 OK", "Name : value"),
        ("HTTP/1.1 200 OK", " folded: line"),
        ("HTTP/1.1 200 OK", "X: a\nContent-Length: 5"),
        ("HTTP/1.1 200 OK", "Content-Length: -1"),
        ("HTTP/1.1 200 OK", "Content-Length: 1, 2"),
        ("HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 6"),
        ("HTTP/1.1 200 OK", "Content-Length: " + "9" * 19),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("HTTP/1.1 206 OK", "Content-Range: bytes 6-x/10"),
        ("HTTP/1.1 206 OK", "Content-Range: pages 2-6/10"),
    ],
)
def test_what_is_no_head(lines: tuple[str, ...]) -> None:
    with pytest.raises(MalformedAnswerError):
        head_of(*lines)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer_or_malformed(data: bytes) -> None:
    for raw in (data, b"HTTP/1.1 206 x\r\n" + data):
        with suppress(MalformedAnswerError):
            assert 100 <= parse_head(raw).status <= 999
        with suppress(MalformedAnswerError):
            assert len(dechunked(raw)[0]) <= len(raw)


def in_chunks(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=5), st.binary(min_size=1, max_size=3))
def test_chunks_are_taken_apart_at_any_moment(pieces: list[bytes], more: bytes) -> None:
    raw, data = in_chunks(pieces), b"".join(pieces)
    assert dechunked(raw) == (data, True)
    for end in range(len(raw)):
        arrived, is_complete = dechunked(raw[:end])
        assert data.startswith(arrived)
        assert not is_complete
    assert dechunked(raw + more) == (data, False)


def test_chunk_extensions_and_trailers() -> None:
    assert dechunked(b"3;a=b\r\nabc\r\n0\r\n\r\n") == (b"abc", True)
    assert dechunked(b"3\r\nabc\r\n0\r\nTrailer: x\r\n\r\n") == (b"abc", False)


@pytest.mark.parametrize("raw", [b"x\r\n", b"-1\r\n", b"2\r\nabc\r\n", b"3\r\nabcd"])
def test_what_are_no_chunks(raw: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        dechunked(raw)
