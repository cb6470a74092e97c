"""A process that asks another one for remote reads: the same answers, whatever happens to either."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.remote_requests import P0, asked, in_ms, joined
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.tiers.waiting import until
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import (
    OffsetBelowLogStartError,
    OffsetGapError,
    RemoteLogError,
    RemoteReadTimeoutError,
    RetriableRemoteStorageError,
)
from tiers.reader.chunk_cache import ChunkCache
from tiers.reader.chunk_fetcher import Caller, RemoteLogReaderSettings
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.reader.remote_reads import TracedReads, TracedStore
from tiers.reader.shared import channel
from tiers.reader.shared.channel import SharedBuffers, listen
from tiers.reader.shared.lent_reads import RemoteReadClient, RemoteReadServer, sendable
from tiers.tracing import traceparent

LARGE = 300_000
"""The size of a batch whose chunk is large enough for shared memory."""


class Processes:
    """The reader's process and the borrowers' processes, in one event loop. The cache has room for two large chunks."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.tier = RemoteTier(folder)
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = provider.get_tracer("tidegate")
        self.listener = stack.enter_context(listen())
        self.buffers = SharedBuffers()
        remote_log = RemoteLogConfig(chunk_cache_bytes=LARGE * 3)
        self.reader = RemoteLogReader(
            self.tier.rlmm.log,
            TracedStore(self.tier.storage, self.tracer),
            RemoteLogReaderSettings(remote_log=remote_log, max_get_bytes=LARGE * 2, read_ahead_bytes=1),
            share=self.buffers.share,
        )
        self.server: RemoteReadServer
        self.calls = 0
        """How often the server was about to use the metadata."""
        self._stack = stack

    async def start(self) -> None:
        self.server = RemoteReadServer(self.listener, self.reader, self.buffers, self._count_call)
        await self._stack.enter_async_context(self.server)

    def _count_call(self) -> None:
        self.calls += 1

    async def client(self) -> RemoteReadClient:
        return await self._stack.enter_async_context(RemoteReadClient(self.listener.getsockname(), monotonic_ms))

    async def fill(self, segments: int = 1, batches: int = 1) -> list[bytes]:
        return await self.tier.fill(P0, segments=segments, batches=batches, records=1, value_bytes=LARGE)

    @property
    def is_lent(self) -> bool:
        return any(views for each in self.server.borrowers.values() for views in each.lent.values())

    async def until_given_back(self, borrowers: int) -> None:
        await until(lambda: len(self.server.borrowers) == borrowers and not self.is_lent, timeout_s=60)


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        made = Processes(tmp_path, stack)
        await stack.enter_async_context(made.reader)
        await made.start()
        yield made


async def test_a_borrower_gets_the_readers_own_answers(processes: Processes) -> None:
    batches = await processes.fill(segments=2, batches=4)
    client, reader = await processes.client(), processes.reader
    for offset in range(8):
        own, ours = await reader.read(asked(offset, 1)), await client.read(asked(offset, 1))
        assert joined(ours) == joined(own) == batches[offset]
        assert (ours.first_offset, ours.next_offset, ours.size_bytes) == (offset, offset + 1, own.size_bytes)
        assert (ours.segment_id, ours.is_cache_hit, ours.records[0].readonly) == (own.segment_id, True, True)
    assert (processes.calls, processes.buffers.size_bytes >= LARGE) == (8, True)
    assert (await client.read(asked(2, isolation_level=1))).aborted_transactions == ()
    caller = Caller(in_ms(), 1)
    assert await client.leader_epochs(P0, caller) == await reader.leader_epochs(P0, caller)
    assert await client.offset_for_timestamp(P0, 1_000_005, 0, 8, caller) == (1_000_005, 5, 0)
    assert await client.max_timestamp(P0, 0, 8, caller) == (1_000_007, 7, 0)


async def test_small_answers_are_copied_also_if_they_are_many(processes: Processes) -> None:
    batches = await processes.tier.fill(P0, segments=1, batches=200, records=10, value_bytes=100)
    client = await processes.client()
    while (read := await client.read(asked(0, LARGE * 4))).next_offset < 2000:
        pass  # the first answer does not wait for the later chunks
    assert joined(read) == b"".join(batches)
    assert processes.buffers.size_bytes == 0


async def test_memory_that_a_socket_may_still_send_is_never_written(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache evicts what the borrower still has."""
    monkeypatch.setattr(channel, "_MAX_FREE_BYTES", 0)
    batches = await processes.fill(batches=12)
    client, other = await processes.client(), await processes.client()
    held = [(await client.read(asked(offset, max_bytes=1))).records[0][5:] for offset in (0, 3)]
    await client.__aexit__(None, None, None)  # it stops, and still has views
    for _ in range(2):
        for offset in range(12):
            assert joined(await other.read(asked(offset, max_bytes=1))) == batches[offset]
    assert held == [batches[0][5:], batches[3][5:]]
    assert len(processes.server.borrowers) == 2
    held.clear()
    await processes.until_given_back(borrowers=1)


async def test_errors_arrive_as_they_were_raised(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    await processes.fill(batches=9)
    client = await processes.client()
    with pytest.raises(OffsetGapError, match="no remote segment"):
        await client.read(asked(999))
    await processes.tier.rlmm.put_log_start(P0, user_log_start(5))
    with pytest.raises(OffsetBelowLogStartError):
        await client.read(asked(3))
    processes.tier.storage.is_down = True
    with pytest.raises(RemoteReadTimeoutError) as raised:
        await client.read(asked(5, timeout_ms=100))
    assert (raised.value.retriable, raised.value.cause is None) == (True, False)
    monkeypatch.setattr(processes.reader, "leader_epochs", None)  # a defect fails one call alone
    with pytest.raises(RemoteLogError, match="TypeError"):
        await client.leader_epochs(P0, Caller(in_ms(), 1))
    processes.tier.storage.is_down = False
    assert (await client.read(asked(5))).size_bytes > 0


def test_an_error_that_cannot_be_sent_becomes_one_like_it() -> None:
    class OfALibrary(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    timeout = sendable(RemoteReadTimeoutError("late", OfALibrary("503")))
    assert isinstance(timeout, RemoteReadTimeoutError)
    assert (str(timeout), timeout.retriable) == ("late", True)
    assert "503" in str(timeout.cause)
    plain = RetriableRemoteStorageError("slow down")
    assert sendable(plain) is plain


async def test_calls_of_a_process_that_died_are_answered_by_the_next(processes: Processes) -> None:
    (batch,) = await processes.fill()
    client = await processes.client()
    held = await client.read(asked(0))
    processes.tier.storage.gate = asyncio.Event()
    processes.reader.fetcher.chunk_cache = ChunkCache(1)
    processes.tier.storage.asked.clear()
    calling = asyncio.create_task(client.read(asked(0)))
    await processes.tier.storage.asked.wait()
    await processes.server.__aexit__()
    processes.tier.storage.gate.set()
    await processes.start()
    assert joined(await calling) == batch
    assert joined(held) == batch, "the memory of the process that died is still there"


@pytest.mark.parametrize("is_listening", [True, False])
async def test_without_a_reader_a_call_ends_at_its_deadline(is_listening: bool) -> None:
    with listen() as listener:
        address = listener.getsockname() if is_listening else b"\0no-such-name"
        async with RemoteReadClient(address, monotonic_ms) as client:
            with pytest.raises(RemoteReadTimeoutError) as raised:
                await client.read(asked(0, timeout_ms=50))
    assert isinstance(raised.value.cause, OSError) != is_listening


async def test_a_cancelled_call_ends_in_the_other_process(processes: Processes) -> None:
    await processes.fill()
    client = await processes.client()
    processes.tier.storage.gate = asyncio.Event()
    calling = asyncio.create_task(client.read(asked(0)))
    await processes.tier.storage.asked.wait()
    (borrower,) = processes.server.borrowers.values()
    assert len(borrower.calls) == 1
    calling.cancel()
    await until(lambda: not borrower.calls)
    processes.tier.storage.gate.set()
    assert (await client.read(asked(0))).size_bytes > 0


@pytest.fixture
def cut_next_message(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The kernel drops the descriptors of the next message that has some."""
    receive, cuts = socket.recv_fds, list[int]()

    def cut(peer: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int], int, Any]:
        body, fds, flags, address = receive(peer, size, max_fds)
        return body, fds, flags | cuts.pop() if fds and cuts else flags, address

    monkeypatch.setattr(socket, "recv_fds", cut)
    return lambda: cuts.append(socket.MSG_CTRUNC)


async def test_a_cut_message_ends_no_loan_of_a_borrower_that_lives(
    processes: Processes, cut_next_message: Callable[[], None]
) -> None:
    """The borrower has no descriptor left for the second answer, while a socket sends the first one."""
    batches = await processes.fill(segments=2, batches=4)
    client = await processes.client()
    first = await client.read(asked(0, max_bytes=1))
    cut_next_message()
    second = await client.read(asked(4, max_bytes=1))
    assert len(processes.server.borrowers) == 2, "the first connection stays for its loan"
    assert (joined(first), second.first_offset) == (batches[0], 4)
    del first, second
    await processes.until_given_back(borrowers=1)


async def test_a_reader_without_a_descriptor_says_so_and_keeps_no_loan(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await processes.fill()
    client = await processes.client()
    await client.read(asked(0))
    await processes.until_given_back(borrowers=1)

    def dup(fd: int) -> int:
        raise OSError(errno.EMFILE, "no file left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", dup)
        with pytest.raises(RetriableRemoteStorageError, match="no file descriptor"):
            await client.read(asked(0, timeout_ms=60_000))
    assert not processes.is_lent
    assert (await client.read(asked(0))).size_bytes > 0


async def test_a_process_that_cannot_be_accepted_is_accepted_later(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two attempts is a pause, although the connection waits all the time."""
    await processes.fill()
    monkeypatch.setattr(channel, "_RETRY_S", 0.5)
    refusals = 0

    def no_descriptor(listener: socket.socket) -> socket.socket:
        nonlocal refusals
        refusals += 1
        raise OSError(errno.EMFILE, "no file left")

    with monkeypatch.context() as patch:
        patch.setattr(channel, "accept", no_descriptor)
        client = await processes.client()
        reading = asyncio.create_task(client.read(asked(0, timeout_ms=60_000)))
        await asyncio.sleep(0.1)
    assert refusals == 1
    assert (await reading).size_bytes > 0


@pytest.mark.parametrize("is_reader", [True, False])
async def test_a_process_of_another_user_gets_and_gives_nothing(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, is_reader: bool
) -> None:
    await processes.fill()
    client = await processes.client()
    own = os.geteuid()
    users = iter([own + 1] * 9 if is_reader else [own, own + 1] * 99)  # of the listener, then of the one that asks
    monkeypatch.setattr(channel, "_user_of", lambda peer: next(users))
    with pytest.raises(RetriableRemoteStorageError if is_reader else RemoteReadTimeoutError):
        await client.read(asked(0, timeout_ms=50))
    assert not processes.server.borrowers


async def test_a_trace_goes_on_in_the_process_that_reads(processes: Processes) -> None:
    """Each read of the borrower is one span, and the calls of the store that it led to are below it."""
    await processes.fill()
    tracer = processes.tracer
    reads = TracedReads(await processes.client(), tracer, processes.tier.state)
    fetch = tracer.start_span("Fetch")
    for trace in (traceparent(fetch), traceparent(fetch), ""):
        await reads.read(asked(0, trace=trace))
    fetch.end()
    spans = processes.spans.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans if span.context is not None}
    parents = [(span.name, None if span.parent is None else names[span.parent.span_id]) for span in spans]
    calls = [("fetch_indexes", "read orders"), ("fetch_log_segment", "read orders")]
    assert parents == [*calls, ("read orders", "Fetch"), ("read orders", "Fetch"), ("Fetch", None)]
