"""Ranged GETs over kept connections: what each answer of a store, right or hostile, leads to."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.servers.certificates import Authority
from tests.support.servers.stream_server import StreamServer
from tests.support.tiers.waiting import until
from tiers.storage.activity import PIECE_BYTES
from tiers.storage.s3 import range_reader
from tiers.storage.s3.range_connection import (
    MAX_HEAD_BYTES,
    ByteRange,
    LostConnectionError,
    OtherAnswerError,
    UnansweredError,
    UnexpectedAnswerError,
)
from tiers.storage.s3.range_reader import RangeReader

RANGE = ByteRange(2, 6)
RIGHT = b"HTTP/1.1 206 x\r\nContent-Length: 5\r\nContent-Range: bytes 2-6/10\r\n\r\n23456"
CLOSE = b"close"
"""In an answer: the store closes the connection."""
HOLD = b"hold"
"""In an answer: the store sends nothing more, and waits for the client to close."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection closes because it is idle, so each one that closes has another reason."""
    monkeypatch.setattr(range_reader, "IDLE_S", 3600.0)


class Store:
    """Answers each GET with the next one of `answers`: pieces to send, `CLOSE` or `HOLD`."""

    def __init__(self) -> None:
        self.answers: deque[list[bytes]] = deque()
        self.requests: list[bytes] = []
        self.accepted = 0
        self.open = 0
        self.url = ""

    def answer(self, *pieces: bytes) -> None:
        self.answers.append([*pieces])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.answers.popleft():
                    if piece is CLOSE:
                        return
                    if piece is HOLD:
                        await reader.read()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def reading(
    max_connections: int = 2, tls: ssl.SSLContext | None = None, trusted: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Store, RangeReader]]:
    store = Store()
    async with StreamServer(store.serve, tls=tls) as server:
        store.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.port}/b/k?X-Amz-Signature=1%2F2"
        reader = RangeReader(max_connections, tls=lambda: trusted or ssl.create_default_context())
        try:
            yield store, reader
        finally:
            await reader.close()


def nothing() -> None:
    return


async def get(store: Store, reader: RangeReader, asked: ByteRange = RANGE) -> bytes:
    return bytes(await asyncio.wait_for(reader.get(store.url, asked, nothing), 30))


async def test_one_connection_serves_one_get_after_the_other() -> None:
    async with reading() as (store, reader):
        for _ in range(3):
            store.answer(RIGHT)
            assert await get(store, reader) == b"23456"
        store.answer(b"HTTP/1.1 200 x\r\nContent-Length: 10\r\n\r\n", b"01234", b"56789")
        assert await get(store, reader, ByteRange(0, None)) == b"0123456789"
        for asked in (ByteRange(7, None), ByteRange(7, 20)):
            store.answer(b"HTTP/1.1 206 x\r\nContent-Length: 3\r\nContent-Range: bytes 7-9/10\r\n\r\n789")
            assert await get(store, reader, asked) == b"789"  # the object ends before the range does
        assert store.accepted == 1
        host = store.url.split("/")[2].encode()
        line = b"GET /b/k?X-Amz-Signature=1%2F2 HTTP/1.1\r\nHost: " + host + b"\r\n"
        rest = b"Accept-Encoding: identity\r\nCache-Control: no-cache\r\n\r\n"
        assert store.requests[0] == line + b"Range: bytes=2-6\r\n" + rest
        assert store.requests[3] == line + rest
        assert b"Range: bytes=7-\r\n" in store.requests[4]


async def gets_the_range(store: Store, reader: RangeReader, accepted: int) -> None:
    """The next GET succeeds, on the connection of that number."""
    store.answer(RIGHT)
    assert await get(store, reader) == b"23456"
    assert store.accepted == accepted


async def test_a_connection_that_the_store_closed_is_not_used() -> None:
    async with reading() as (store, reader):
        store.answer(RIGHT, CLOSE)
        await get(store, reader)
        await until(lambda: store.open == 0)
        await gets_the_range(store, reader, accepted=2)
        store.answer(CLOSE)  # the connection that is kept ends unanswered, which costs no error
        await gets_the_range(store, reader, accepted=3)
        assert len(store.requests) == 4
        store.answer(RIGHT[:-1], CLOSE)
        with pytest.raises(LostConnectionError, match="after 4 of 5 bytes"):
            await get(store, reader)
        assert len(store.requests) == 5
        await gets_the_range(store, reader, accepted=4)


async def test_connections_close_when_nothing_is_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "IDLE_S", 0.05)
    async with reading() as (store, reader):
        store.answer(RIGHT)
        store.answer(RIGHT)
        await asyncio.gather(get(store, reader), get(store, reader))
        await until(lambda: store.open == 0)
        await gets_the_range(store, reader, accepted=3)


async def test_a_cancelled_get_leaves_no_connection_to_the_next() -> None:
    async with reading(max_connections=1) as (store, reader):
        has_head = asyncio.Event()
        for arrived in (RIGHT[:20], RIGHT[:-2]):
            store.answer(arrived, HOLD)
            reads = asyncio.create_task(reader.get(store.url, RANGE, has_head.set))
            await until(lambda: not store.answers)
            if RIGHT[:-2] == arrived:
                await has_head.wait()
            reads.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reads
            store.answer(b"HTTP/1.1 206 x\r\nContent-Length: 1\r\nContent-Range: bytes 2-2/10\r\n\r\n2")
            assert await get(store, reader, ByteRange(2, 2)) == b"2"
            await until(lambda: store.open <= 1)
        assert store.accepted == 3


def head(*fields: bytes, line: bytes = b"HTTP/1.1 206 x") -> bytes:
    return b"\r\n".join([line, *fields, b"", b""])


FIVE, PLACE = b"Content-Length: 5", b"Content-Range: bytes 2-6/10"


@pytest.mark.parametrize(
    ("answer", "expected", "said"),
    [
        ([RIGHT[:-3], CLOSE], LostConnectionError, "after 2 of 5"),
        ([RIGHT[:30], CLOSE], LostConnectionError, "in the head"),
        ([CLOSE], UnansweredError, "closed the connection"),
        ([head(b"Content-Length: 6") + b"234567"], UnexpectedAnswerError, "has 6 bytes"),
        ([head(b"Content-Length: 3") + b"234"], UnexpectedAnswerError, "has 3 bytes"),
        ([head(b"Content-Length: 0")], UnexpectedAnswerError, "has 0 bytes"),
        ([head(b"Content-Length: 3", b"Content-Range: bytes 2-4/10") + b"234"], UnexpectedAnswerError, "bytes 2-4/10"),
        ([head(b"Content-Length: 3", b"Content-Range: bytes 2-4/*") + b"234"], UnexpectedAnswerError, r"bytes 2-4/\*"),
        ([RIGHT.replace(b"2-6", b"3-7")], UnexpectedAnswerError, "bytes 3-7"),
        ([RIGHT.replace(b"2-6", b"2-5")], UnexpectedAnswerError, "bytes 2-5"),
        ([RIGHT.replace(b"bytes 2-6/10", b"lines 2-6/10")], UnexpectedAnswerError, "lines 2-6"),
        ([head() + b"23456", CLOSE], OtherAnswerError, "206"),
        ([head(b"Transfer-Encoding: chunked") + b"5\r\n23456\r\n0\r\n\r\n"], OtherAnswerError, "206"),
        ([head(FIVE, b"Transfer-Encoding: chunked") + b"5\r\n23456\r\n0\r\n\r\n"], OtherAnswerError, "206"),
        ([head(FIVE, b"Content-Length: 6", PLACE) + b"23456"], OtherAnswerError, "206"),
        ([head(b"Content-Length: -1")], OtherAnswerError, "206"),
        ([head(b"Content-Length: " + b"9" * 19)], OtherAnswerError, "206"),
        ([head(FIVE, PLACE, b"no colon") + b"23456"], OtherAnswerError, "status 0"),
        ([head(FIVE, PLACE, b"Name : value") + b"23456"], OtherAnswerError, "status 0"),
        ([head(FIVE, PLACE, b" folded: line") + b"23456"], OtherAnswerError, "status 0"),
        ([head(FIVE, PLACE, b"X: a\nContent-Length: 5") + b"23456"], OtherAnswerError, "status 0"),
        ([head(line=b"HTTP/2 206 x")], OtherAnswerError, "status 0"),
        ([head(line=b"HTTP/1.1 20 x")], OtherAnswerError, "status 0"),
        ([b"nonsense\r\n\r\n"], OtherAnswerError, "status 0"),
        ([b"HTTP/1.1 206 x\r\nX: " + b"y" * MAX_HEAD_BYTES], OtherAnswerError, "status 0"),
        ([head(line=b"HTTP/1.1 100 x") + RIGHT], OtherAnswerError, "100"),
        ([head(FIVE, line=b"HTTP/1.1 200 x") + b"01234"], OtherAnswerError, "200"),
        ([head(b"Content-Length: 9", line=b"HTTP/1.1 404 x") + b"<Code>404"], OtherAnswerError, "404"),
    ],
)
async def test_what_is_not_the_range(answer: list[bytes], expected: type[Exception], said: str) -> None:
    async with reading() as (store, reader):
        store.answer(*answer)
        with pytest.raises(expected, match=said) as raised:
            await get(store, reader)
        assert type(raised.value) is expected
        await until(lambda: store.open == 0)
        await gets_the_range(store, reader, accepted=2)


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        ((b"HTTP/1.1 206 x",), True),
        ((b"HTTP/1.1 206 x", b"connection: Keep-Alive"), True),
        ((b"HTTP/1.1 206 x", b"Connection: Close"), False),
        ((b"HTTP/1.1 206 x", b"Connection: upgrade , close"), False),
        ((b"HTTP/1.0 206 x",), False),
    ],
)
async def test_a_connection_is_kept_if_the_answer_says_so(said: tuple[bytes, ...], is_kept: bool) -> None:
    async with reading() as (store, reader):
        store.answer(head(*said[1:], FIVE, PLACE, line=said[0]) + b"23456")
        assert await get(store, reader) == b"23456"
        await gets_the_range(store, reader, accepted=1 if is_kept else 2)


@pytest.mark.parametrize("more", [b"7", RIGHT])
async def test_bytes_behind_an_answer_end_the_connection(more: bytes) -> None:
    async with reading() as (store, reader):
        store.answer(RIGHT + more)
        assert await get(store, reader) == b"23456"
        await until(lambda: store.open == 0)
        store.answer(RIGHT, b"late")
        assert await get(store, reader) == b"23456"
        await until(lambda: store.open == 0)
        assert store.accepted == 2


async def test_a_length_that_no_memory_has_is_an_error() -> None:
    async with reading() as (store, reader):
        store.answer(b"HTTP/1.1 200 x\r\nContent-Length: 999999999999999999\r\n\r\nx")
        with pytest.raises(UnexpectedAnswerError, match="announces"):
            await get(store, reader, ByteRange(0, None))


async def test_each_piece_is_progress() -> None:
    size = 5 * PIECE_BYTES + 1
    async with reading() as (store, reader):
        moved: list[int] = []
        store.answer(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % size, *[b"x" * PIECE_BYTES] * 5, b"y")
        body = await asyncio.wait_for(reader.get(store.url, ByteRange(0, None), lambda: moved.append(1)), 30)
        assert body == b"x" * (size - 1) + b"y"
        assert 2 <= len(moved) <= 6


async def test_closing_ends_gets_and_connections() -> None:
    async with reading() as (store, reader):
        store.answer(RIGHT)
        await get(store, reader)
        store.answer(RIGHT[:-1], HOLD)
        store.answer(HOLD)
        reads = [asyncio.create_task(get(store, reader)) for _ in range(2)]
        await until(lambda: not store.answers)
        await reader.close()
        for one in reads:
            with pytest.raises(LostConnectionError):
                await one
        await until(lambda: store.open == 0)
        with pytest.raises(LostConnectionError, match="the reader is closed"):
            await get(store, reader)
        await reader.close()


async def test_a_store_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(authority.identity("store"))
    trusted = ssl.create_default_context(cafile=authority.ca)
    size = 3 * PIECE_BYTES + 5
    async with reading(tls=server, trusted=trusted) as (store, reader):
        for _ in range(2):
            store.answer(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
            assert await get(store, reader, ByteRange(0, None)) == b"x" * size
        assert store.accepted == 1
        store.answer(RIGHT[:-1], CLOSE)
        with pytest.raises(LostConnectionError):
            await get(store, reader)
    async with reading(tls=server) as (store, reader):
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(store, reader)


@pytest.mark.parametrize(
    "url", ["ftp://h/k", "http:///k", "http://h/k k", "http://h/k\r\nX: y", "http://h:x/k", "http://h/\u00fc", "k"]
)
async def test_what_is_no_url_of_a_store(url: str) -> None:
    reader = RangeReader(1)
    with pytest.raises(ValueError, match=r"."):
        await reader.get(url, RANGE, nothing)
    await reader.close()
