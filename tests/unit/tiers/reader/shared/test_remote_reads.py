"""A process that asks another one for remote reads: the same answers, whatever happens to either."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.recording_tracer import RecordingTracer
from tests.support.fakes.remote_requests import P0, asked, in_ms, joined
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.tiers.waiting import until
from tiers.config.settings import RemoteLogConfig
from tiers.errors import (
    OffsetBelowLogStartError,
    OffsetGapError,
    RemoteLogError,
    RemoteReadTimeoutError,
    RetriableRemoteStorageError,
)
from tiers.reader.remote_log_reader import (
    RemoteLogReader,
    RemoteLogReaderSettings,
    monotonic_ms,
)
from tiers.reader.shared import buffers as buffers_module
from tiers.reader.shared import client as client_module
from tiers.reader.shared import server as server_module
from tiers.reader.shared.buffers import SharedBuffers
from tiers.reader.shared.channel import listen
from tiers.reader.shared.client import RemoteReadClient
from tiers.reader.shared.messages import sendable
from tiers.reader.shared.server import RemoteReadServer
from tiers.reader.traced_reads import ContinuedReads, TracedReads, TracedStore
from tiers.tracing import ClientFetch, Tracer

LARGE = 300_000
"""The size of a batch whose chunk is large enough for shared memory."""


class Processes:
    """The reader's process and the borrowers' processes, in one event loop."""

    def __init__(
        self, tier: RemoteTier, stack: AsyncExitStack, *, cache_bytes: int = 8 << 20, tracer: Tracer | None = None
    ) -> None:
        self.tier = tier
        self.tracer = tracer
        self.listener = stack.enter_context(listen())
        self.buffers = SharedBuffers(lambda number: self.server.on_dropped(number))
        self.reader = RemoteLogReader(
            tier.rlmm.log,
            tier.storage if tracer is None else TracedStore(tier.storage, tracer),
            RemoteLogReaderSettings(
                remote_log=RemoteLogConfig(chunk_cache_bytes=cache_bytes, read_ahead_bytes=1),
                min_get_bytes=1,
                max_get_bytes=LARGE * 2,
            ),
            share=self.buffers.share,
        )
        self.server: RemoteReadServer
        self.calls = 0
        """How often the server was about to use the metadata."""
        self._stack = stack

    async def start(self) -> None:
        reads = self.reader if self.tracer is None else ContinuedReads(self.reader)
        self.server = RemoteReadServer(self.listener, reads, self.buffers, self._count_call)
        await self.server.__aenter__()
        self._stack.push_async_exit(self.server.__aexit__)

    def _count_call(self) -> None:
        self.calls += 1

    async def client(self) -> RemoteReadClient:
        return await self._stack.enter_async_context(
            RemoteReadClient(self.listener.getsockname(), monotonic_ms, jitter=lambda: 0.1)
        )

    @property
    def is_lent(self) -> bool:
        return any(buffer.lent for buffer in self.buffers._buffers.values())


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def running(tmp_path: Path, stack: AsyncExitStack, **settings: Any) -> Processes:
    processes = Processes(RemoteTier(tmp_path), stack, **settings)
    await stack.enter_async_context(processes.reader)
    await processes.start()
    return processes


@pytest.fixture
async def processes(tmp_path: Path, stack: AsyncExitStack) -> Processes:
    return await running(tmp_path, stack)


async def test_a_borrower_gets_the_readers_own_answers(processes: Processes) -> None:
    batches = await processes.tier.fill(P0, segments=2, batches=4, records=1, value_bytes=LARGE)
    client, reader = await processes.client(), processes.reader
    for offset in range(8):
        await reader.read(asked(offset))
    for offset in range(8):
        ours, own = await client.read(asked(offset, LARGE * 4)), await reader.read(asked(offset, LARGE * 4))
        assert joined(ours).startswith(batches[offset])
        assert (joined(ours), ours.size_bytes) == (joined(own), own.size_bytes)
        assert (ours.first_offset, ours.next_offset) == (own.first_offset, own.next_offset)
        assert all(view.readonly for view in ours.records)
    assert (ours.segment_id, ours.is_cache_hit) == (own.segment_id, own.is_cache_hit)
    assert processes.buffers.size_bytes >= LARGE * 8
    assert processes.calls == 8
    assert (await client.read(asked(2, isolation_level=1))).aborted_transactions == ()
    how = {"deadline_ms": in_ms(), "connection_id": 1}
    assert await client.leader_epochs(P0, **how) == await reader.leader_epochs(P0, **how)
    assert await client.offsets.offset_for_timestamp(P0, 1_000_005, 0, 8, **how) == (1_000_005, 5, 0)
    assert await client.offsets.max_timestamp(P0, 0, 8, **how) == (1_000_007, 7, 0)


async def test_small_answers_are_copied_also_if_they_are_many(processes: Processes) -> None:
    batches = await processes.tier.fill(P0, segments=1, batches=200, records=10, value_bytes=100)
    client = await processes.client()
    read = await client.read(asked(0, LARGE * 4))
    while read.next_offset < 2000:  # the first answer does not wait for the later chunks
        read = await client.read(asked(0, LARGE * 4))
    assert joined(read) == b"".join(batches)
    assert processes.buffers.size_bytes == 0


async def test_records_are_lent_until_the_last_view_is_gone(processes: Processes) -> None:
    batches = await processes.tier.fill(P0, segments=1, batches=2, records=1, value_bytes=LARGE)
    client = await processes.client()
    read = await client.read(asked(0, max_bytes=1))
    part = read.records[0][5:10]
    del read
    gc.collect()
    await processes.reader.read(asked(1))
    assert processes.is_lent
    assert bytes(part) == batches[0][5:10]
    del part
    await until(lambda: not processes.is_lent)


async def test_memory_that_a_socket_may_still_send_is_never_written(tmp_path: Path, stack: AsyncExitStack) -> None:
    """The cache has room for two of many chunks, so it evicts what the borrower still has."""
    processes = await running(tmp_path, stack, cache_bytes=LARGE * 3)
    batches = await processes.tier.fill(P0, segments=1, batches=12, records=1, value_bytes=LARGE)
    client, other = await processes.client(), await processes.client()
    held = [await client.read(asked(offset, max_bytes=1)) for offset in (0, 3)]
    await client.__aexit__(None, None, None)  # it stops, and still has views
    for _ in range(2):
        for offset in range(12):
            assert joined(await other.read(asked(offset, max_bytes=1))) == batches[offset]
    assert [joined(read) for read in held] == [batches[0], batches[3]]
    assert processes.server.borrower_count == 2
    held.clear()
    await until(lambda: processes.server.borrower_count == 1)


async def test_a_borrower_keeps_no_memory_that_the_reader_dropped(
    tmp_path: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers_module, "_MAX_FREE_BYTES", 0)
    processes = await running(tmp_path, stack, cache_bytes=LARGE * 3)
    await processes.tier.fill(P0, segments=1, batches=12, records=1, value_bytes=LARGE)
    client = await processes.client()
    for offset in range(12):
        await client.read(asked(offset, max_bytes=1))
    await until(lambda: not processes.is_lent)
    processes.buffers.allocate(1)  # it takes notice of what is unused
    await client.read(asked(11, max_bytes=1))
    assert client._connection is not None
    assert set(client._connection._buffers._maps) <= set(processes.buffers._buffers)


async def test_errors_arrive_as_they_were_raised(processes: Processes) -> None:
    await processes.tier.fill(P0, segments=1, batches=1)
    client = await processes.client()
    with pytest.raises(OffsetGapError, match="no remote segment"):
        await client.read(asked(999))
    await processes.tier.rlmm.put_log_start(P0, user_log_start(5))
    with pytest.raises(OffsetBelowLogStartError):
        await client.read(asked(3))
    processes.tier.storage.is_down = True
    processes.reader.index_cache = processes.reader.index_cache.__class__(1)
    with pytest.raises(RemoteReadTimeoutError) as raised:
        await client.read(asked(5, timeout_ms=100))
    assert (raised.value.retriable, raised.value.cause is None) == (True, False)


async def test_a_defect_fails_one_call_alone(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    await processes.tier.fill(P0, segments=1, batches=1)
    client = await processes.client()

    async def fail(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(processes.reader, "leader_epochs", fail)
    with pytest.raises(RemoteLogError, match="ZeroDivisionError"):
        await client.leader_epochs(P0, deadline_ms=in_ms(), connection_id=1)
    assert (await client.read(asked(0))).size_bytes > 0


async def test_calls_of_a_process_that_died_are_answered_by_the_next(processes: Processes) -> None:
    batches = await processes.tier.fill(P0, segments=1, batches=1, records=1, value_bytes=LARGE)
    client = await processes.client()
    held = await client.read(asked(0))
    processes.tier.storage.gate = asyncio.Event()
    processes.reader.chunk_cache = processes.reader._fetcher._chunk_cache = processes.reader.chunk_cache.__class__(1)
    processes.tier.storage.asked.clear()
    calling = asyncio.create_task(client.read(asked(0)))
    await processes.tier.storage.asked.wait()
    await processes.server.__aexit__(None, None, None)
    processes.tier.storage.gate.set()
    await processes.start()
    assert joined(await calling) == batches[0]
    assert joined(held) == batches[0], "the memory of the process that died is still there"


async def test_without_a_reader_a_call_ends_at_its_deadline(stack: AsyncExitStack) -> None:
    listener = stack.enter_context(listen())
    async with RemoteReadClient(listener.getsockname(), monotonic_ms) as client:
        with pytest.raises(RemoteReadTimeoutError):
            await client.read(asked(0, timeout_ms=50))
    async with RemoteReadClient(b"\0no-such-name", monotonic_ms) as client:
        with pytest.raises(RemoteReadTimeoutError) as raised:
            await client.read(asked(0, timeout_ms=50))
        assert isinstance(raised.value.cause, OSError)


async def test_a_cancelled_call_ends_in_the_other_process(processes: Processes) -> None:
    await processes.tier.fill(P0, segments=1, batches=1)
    client = await processes.client()
    processes.tier.storage.gate = asyncio.Event()
    calling = asyncio.create_task(client.read(asked(0)))
    await processes.tier.storage.asked.wait()
    (borrower,) = processes.server._borrowers.values()
    assert len(borrower._calls) == 1
    calling.cancel()
    await asyncio.wait([calling])
    await until(lambda: not borrower._calls)
    processes.tier.storage.gate.set()
    assert (await client.read(asked(0))).size_bytes > 0


async def test_a_borrower_that_dies_gives_everything_back(processes: Processes) -> None:
    await processes.tier.fill(P0, segments=1, batches=1, records=1, value_bytes=LARGE)
    client = await processes.client()
    held = await client.read(asked(0))
    processes.tier.storage.gate = asyncio.Event()
    assert processes.is_lent
    assert client._connection is not None
    client._connection._channel.close()  # as the kernel does when a process has died
    await until(lambda: processes.server.borrower_count == 0 and not processes.is_lent)
    assert held.records


def cut_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops the descriptors of the next message that has some."""
    receive, cuts = socket.recv_fds, iter([socket.MSG_CTRUNC])

    def cut_once(peer: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int], int, Any]:
        body, fds, flags, address = receive(peer, size, max_fds)
        return body, fds, flags | next(cuts, 0) if fds else flags, address

    monkeypatch.setattr(socket, "recv_fds", cut_once)


async def test_a_cut_message_ends_no_loan_of_a_borrower_that_lives(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The borrower has no descriptor left for the second answer, while a socket sends the first one."""
    await processes.tier.fill(P0, segments=2, batches=4, records=1, value_bytes=LARGE)
    client = await processes.client()
    first = await client.read(asked(0, max_bytes=1))
    first_bytes = joined(first)
    cut_the_next_message(monkeypatch)
    second = await client.read(asked(4, max_bytes=1))
    assert processes.server.borrower_count == 2, "the first connection stays for its loan"
    assert (joined(first), second.first_offset) == (first_bytes, 4)
    del first, second
    gc.collect()
    await until(lambda: processes.server.borrower_count == 1 and not processes.is_lent)


async def test_a_loan_that_cannot_be_viewed_ends_with_its_connection(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers are on their way, and the first one, which has the descriptor for both, is cut."""
    await processes.tier.fill(P0, segments=2, batches=1, records=1, value_bytes=LARGE)
    await processes.reader.read(asked(0))
    client = await processes.client()
    held = await client.read(asked(1))
    cut_the_next_message(monkeypatch)
    reads = await asyncio.gather(client.read(asked(0)), client.read(asked(0)))
    assert joined(reads[0]) == joined(reads[1])
    assert held.first_offset == 1
    del held, reads
    gc.collect()
    await until(lambda: processes.server.borrower_count == 1 and not processes.is_lent, timeout_s=60)


async def test_a_process_that_cannot_be_accepted_is_accepted_later(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await processes.tier.fill(P0, segments=1, batches=1)
    monkeypatch.setattr(server_module, "_RETRY_S", 0.01)
    accept, fails = socket.socket.accept, [OSError(errno.EMFILE, "no file left")]

    def accept_later(listener: socket.socket) -> Any:
        if fails:
            raise fails.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    client = await processes.client()
    assert (await client.read(asked(0, timeout_ms=60_000))).size_bytes > 0
    assert not fails


@pytest.mark.parametrize("side", [client_module, server_module])
async def test_a_process_of_another_user_gets_and_gives_nothing(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, side: Any
) -> None:
    await processes.tier.fill(P0, segments=1, batches=1)
    is_own: Callable[[socket.socket], bool] = lambda peer: False  # noqa: E731
    monkeypatch.setattr(side, "is_of_own_user", is_own)
    client = await processes.client()
    with pytest.raises(RetriableRemoteStorageError if side is client_module else RemoteReadTimeoutError):
        await client.read(asked(0, timeout_ms=50))
    assert processes.server.borrower_count == 0


def test_an_error_that_cannot_be_sent_becomes_one_with_the_same_words() -> None:
    class OfALibrary(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    timeout = sendable(RemoteReadTimeoutError("late", OfALibrary("503")))
    assert isinstance(timeout, RemoteReadTimeoutError)
    assert (str(timeout), timeout.retriable) == ("late", True)
    assert "503" in str(timeout.cause)
    plain = RetriableRemoteStorageError("slow down")
    assert sendable(plain) is plain


async def test_a_trace_goes_on_in_the_process_that_reads(tmp_path: Path, stack: AsyncExitStack) -> None:
    """Each read of the borrower is one span, and the calls of the store that it led to are below it."""
    tracer = RecordingTracer()
    processes = await running(tmp_path, stack, tracer=tracer)
    await processes.tier.fill(P0, segments=1, batches=1)
    reads = TracedReads(await processes.client(), tracer, processes.tier.state)
    fetch = tracer.begin(ClientFetch("app", 1, 17, 1), 0)
    assert fetch is not None
    for _ in range(2):
        await reads.read(asked(0, trace=fetch.context))
    await reads.read(asked(0))
    assert tracer.tree() == [
        "ClientFetch:  (in progress)",
        "  PartitionRead: RecordsRead",
        "    StoreRead: StoreAnswered",
        "    StoreRead: StoreAnswered",
        "  PartitionRead: RecordsRead",
    ]
