"""The broker's side of a connection: reads responses, and matches each to its request.

Every client connection has its own broker connection, so that authentication passes through. A response must wait while
the answer before it waits for the remote tier, or while the client does not read. The connection then stops reading
from the broker, and stashes the rest of the last read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol, cast

from protocol.api_keys import ApiKey
from protocol.errors import FrameSizeError, ProtocolError, TruncatedError
from protocol.frame import LENGTH_BYTES, MAX_INT32, RESPONSE_HEAD_BYTES, FramePart, FrameTracker
from protocol.primitives import INT32, Buffer
from proxy.wire.context import Address, ConnectionContext, Endpoint
from proxy.wire.error_log import FaultyFrame, Sender
from proxy.wire.exchange import Buffers, ResponsePatcher
from proxy.wire.flow_control import OUT_OF_TURN, Outlet, ReadGate, owned_parts
from proxy.wire.memory import DECODED_FACTOR, FLOOR_BYTES
from proxy.wire.response_queue import ResponseQueue, Slot
from proxy.wire.socket_transport import MIN_SPLICE_BYTES, SocketTransport
from tiers.broker.tls import explain
from tiers.sockets import connected_socket

logger = logging.getLogger(__name__)

HEAD_BYTES = 4 * 1024
"""What is read where few bytes must be seen. The records behind them then stay in the kernel."""
MAX_UNREACHABLE = 1_000
"""Addresses to remember. A forgotten address costs one attempt."""
GROUPS_AT_ONCE = 512
"""How many groups of fields of a streamed response are patched in one turn of the loop. That takes a few ms."""
_COPIES = 2
"""A response and its answer are in memory together."""
_DECODED_WHOLE = (ApiKey.DESCRIBE_CONFIGS, ApiKey.DESCRIBE_LOG_DIRS)
"""The APIs whose responses are decoded whole, and may have any size. Other responses are as large as their requests."""
LEAST_ATTEMPT_S = 0.002
"""An attempt needs more than that. A timer may be a millisecond early."""
UNKNOWN_BROKER_LOOKS = 20
UNKNOWN_BROKER_PAUSE_S = 0.05
"""The cluster names a broker to a client a moment before the proxy has asked for its address."""


class UpstreamUnavailableError(Exception):
    """No address of the broker could be reached."""


class CorrelationMismatchError(ProtocolError):
    """A response does not answer the next request in order."""


class ClientSide(Protocol):
    """The client's side of the connection, which sent the requests."""

    queue: ResponseQueue
    is_full: bool
    last_active_s: float

    @property
    def can_splice(self) -> bool:
        """Whether `splice` may move bytes."""

    def splice(self, fd: int, max_bytes: int) -> int | None:
        """Moves bytes of the response whose turn it is from the socket `fd`, as `RelayingProtocol` describes it."""

    def emit(self, buffers: Buffers) -> None:
        """Queues bytes of the response whose turn it is."""

    def on_held(self, slot: Slot, response: memoryview) -> None:
        """Takes the head slot's complete response, of which no byte was emitted. The callee owns the buffer."""

    def on_streamed(self, slot: Slot) -> None:
        """Called when the last byte of the head slot's response was emitted."""

    def commit_answers(self, *, aliases_pool: bool) -> None:
        """Sends the emitted bytes. `aliases_pool`: some are slices of the read buffer, which the next read reuses."""

    def advance(self) -> None: ...

    def pause_requests(self) -> None: ...

    def resume_requests(self) -> None: ...

    def on_upstream_gone(self) -> None: ...

    def fail(self, peer: Sender, error: Exception, frame: FaultyFrame | None = None) -> None: ...


class UpstreamConnection(asyncio.BufferedProtocol):
    def __init__(self, context: ConnectionContext, client: ClientSide) -> None:
        self.gate = ReadGate()
        self.streaming_slot: Slot | None = None
        """The slot whose response has left in part."""
        self._context = context
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._outlet = Outlet(context.buffers)
        self._tracker = FrameTracker(RESPONSE_HEAD_BYTES, MAX_INT32)
        self._stash: list[FramePart] = []
        self._slot: Slot | None = None
        self._patcher: ResponsePatcher | None = None
        self._can_splice = False
        self._min_splice_bytes = MIN_SPLICE_BYTES if context.pipes is None else context.pipes.min_splice_bytes
        self._has_streamed = False
        """The last response was large. Then the next one probably is, too."""
        self._held: bytearray | None = None
        self._begun: Buffer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_forgotten = False
        self._loop = asyncio.get_running_loop()

    @property
    def has_stash(self) -> bool:
        return bool(self._stash)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        transport = self._transport = cast(asyncio.Transport, transport)
        self._can_splice = isinstance(transport, SocketTransport) and self._client.can_splice
        self._outlet.attach(transport)
        self.gate.attach(transport)
        self._context.upstreams.add(self)
        self._context.metrics.upstream_connections += 1

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._context.buffers.current
        is_head = self._may_have_to_wait or (sizehint < 0 and self._may_splice_behind_head)
        return buffer[:HEAD_BYTES] if is_head else buffer

    @property
    def _may_have_to_wait(self) -> bool:
        """Whether the next bytes may begin a response that waits for memory. The stash then has its head alone."""
        return self._context.responses.has_waiting and self._held is None and self.streaming_slot is None

    @property
    def _may_splice_behind_head(self) -> bool:
        """Whether bytes that must be seen come next, and records that can be spliced may follow them.

        Within records that are too few to be spliced, whole buffers are read: the next ones are probably as few."""
        if self.streaming_slot is None:
            return self._can_splice and self._has_streamed
        return self.due_bytes > 0 and self._patcher is not None and not self._patcher.passing_bytes

    @property
    def due_bytes(self) -> int:
        if self.streaming_slot is None or not self._can_splice:
            return 0
        due_bytes = self._tracker.remaining
        return due_bytes if due_bytes >= self._min_splice_bytes else 0

    @property
    def opaque_bytes(self) -> int:
        due_bytes = self.due_bytes
        opaque_bytes = due_bytes if self._patcher is None else min(due_bytes, self._patcher.passing_bytes)
        return opaque_bytes if opaque_bytes >= self._min_splice_bytes else 0

    def relay(self, fd: int, max_bytes: int) -> int | None:
        client, slot = self._client, self.streaming_slot
        assert slot is not None
        moved = client.splice(fd, min(self.opaque_bytes, max_bytes))
        if not moved:
            return moved
        client.last_active_s = self._loop.time()
        self._context.metrics.bytes_from_brokers += moved
        self._tracker.skip(moved)
        if self._patcher is not None:
            self._patcher.skip(moved)
        if not self._tracker.remaining:
            self._end_stream(slot)
            client.commit_answers(aliases_pool=False)
            client.advance()
        return moved

    def buffer_updated(self, nbytes: int) -> None:
        client = self._client
        client.last_active_s = self._loop.time()
        self._context.metrics.bytes_from_brokers += nbytes
        data = self._context.buffers.current[:nbytes]
        try:
            self._process(self._tracker.feed(data), aliases_pool=True)
        except Exception as error:
            client.fail("broker", error, self._faulty_frame())

    def eof_received(self) -> bool:
        self._client.on_upstream_gone()
        return False

    def forget(self) -> None:
        """Ends a connection whose opening failed. The client hears no more of it.

        uvloop calls no `connection_lost` for such a connection, or, with TLS, first waits for the broker."""
        self._is_forgotten = True
        self._context.upstreams.discard(self)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._context.upstreams.discard(self)
        self._outlet.on_lost()
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_forgotten:
            self._client.on_upstream_gone()

    def pause_writing(self) -> None:
        self._client.pause_requests()

    def resume_writing(self) -> None:
        if self._outlet.on_drained():
            self._client.resume_requests()

    def send(self, buffers: Sequence[Buffer], *, aliases_pool: bool) -> None:
        self._outlet.write(buffers, aliases_pool=aliases_pool)

    def close(self) -> None:
        """Closes when all requests have left (also Produce with acks=0), at the latest after the close timeout."""
        if self._transport is None or self._transport.is_closing():
            return
        self._timer = self._loop.call_later(self._context.close_timeout_ms / 1000, self._transport.abort)
        self._outlet.close()

    def drop_responses(self) -> None:
        """Drops the responses that wait, and the one that has arrived in part, because the client is gone."""
        self._stash = []
        self._held = self._begun = None
        self._context.responses.forget(id(self._client))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def unblock(self) -> None:
        """Processes stashed responses, because an earlier response has left, or others have had their turns."""
        if not self._stash or self._client.is_full:
            return
        stash, self._stash = self._stash, []
        try:
            self._process(stash, aliases_pool=False)
        except Exception as error:
            self._client.fail("broker", error, self._faulty_frame())
            return
        if not self._stash:
            self.gate.resume(OUT_OF_TURN)

    def _process(self, parts: Sequence[FramePart], *, aliases_pool: bool) -> None:
        client = self._client
        for index, part in enumerate(parts):
            if part.is_start and not self._may_begin(part.size):
                rest = parts[index:]
            else:
                left = self._begin(part) if part.is_start else self._continue(part)
                if left is None:
                    continue
                rest = [left, *parts[index + 1 :]]
                self._loop.call_soon(self.unblock)  # others have their turns first
            self.gate.pause(OUT_OF_TURN)
            self._stash = owned_parts(rest, copy=aliases_pool)
            break
        client.commit_answers(aliases_pool=aliases_pool)
        client.advance()

    def _may_begin(self, size_bytes: int) -> bool:
        """Returns whether the next response may begin. If not, `unblock` is called when it may."""
        queue = self._client.queue
        if not queue.awaiting:
            raise ProtocolError("a response to no request")
        if self._client.is_full:
            return False
        slot = queue.awaiting[0]
        if slot.future is not None or slot.answer is not None:
            return True
        return queue.slots[0] is slot and self._may_hold(slot, size_bytes)

    def _may_hold(self, slot: Slot, size_bytes: int) -> bool:
        """Returns whether there is memory for the response, if it is held. Its handler may have reserved some."""
        responses, limit_bytes = self._context.responses, self._context.limits.max_held_response_bytes
        counted_bytes = size_bytes * (DECODED_FACTOR if slot.api_key in _DECODED_WHOLE else _COPIES)
        needs_memory = counted_bytes > FLOOR_BYTES and size_bytes <= limit_bytes  # above the limit, it is refused
        if not needs_memory or slot.on_sent is not None or not slot.holds(size_bytes):
            return True
        slot.response_grant = responses.admit(id(self._client), counted_bytes, self.unblock)
        if slot.response_grant is None:
            return False
        slot.on_sent = slot.response_grant.release
        return True

    def _begin(self, part: FramePart) -> FramePart | None:
        """Begins a response. Returns the rest of the part, of which too much was to be patched at once."""
        slot = self._client.queue.awaiting.popleft()
        self._slot = slot
        self._begun = part.data[LENGTH_BYTES:]
        if not slot.is_raw_token:
            _check_head(slot, part)
        if slot.answer is not None:
            return None
        is_held = slot.holds(part.size)
        self._has_streamed = not is_held and part.size >= self._min_splice_bytes
        if is_held:
            if part.size > self._context.limits.max_held_response_bytes:
                raise FrameSizeError(f"a response of {part.size} bytes, above the limit of responses that are decoded")
            if part.remaining:
                self._held = bytearray(self._begun)
            elif slot.passes is not None and slot.passes(self._begun):
                self._client.emit((part.data,))
                self._client.on_streamed(slot)
            else:
                slot.passes = None
                self._complete(slot, memoryview(bytes(self._begun)))
            return None
        self.streaming_slot = slot
        if slot.patcher is None:
            return self._stream(slot, part)
        self._patcher = slot.patcher()
        self._client.emit((part.data[:LENGTH_BYTES],))
        return self._stream(slot, part._replace(data=part.data[LENGTH_BYTES:], is_start=False))

    def _continue(self, part: FramePart) -> FramePart | None:
        """Goes on with a response. Returns as `_begin`."""
        slot = self._slot
        assert slot is not None
        if self._held is not None:
            self._held += part.data
            if not part.remaining:
                held, self._held = self._held, None
                self._complete(slot, memoryview(held))
        elif self.streaming_slot is slot:
            return self._stream(slot, part)
        return None

    def _stream(self, slot: Slot, part: FramePart) -> FramePart | None:
        patcher = self._patcher
        self._client.emit((part.data,) if patcher is None else patcher.feed(part.data, GROUPS_AT_ONCE))
        if patcher is not None and patcher.untaken_bytes:
            return part._replace(data=part.data[-patcher.untaken_bytes :])
        if not part.remaining:
            self._end_stream(slot)
        return None

    def _end_stream(self, slot: Slot) -> None:
        self.streaming_slot = self._patcher = None
        self._client.on_streamed(slot)

    def _complete(self, slot: Slot, response: memoryview) -> None:
        if slot.future is not None:
            if not slot.future.done():
                slot.future.set_result(response)
        elif slot.answer is None:
            self._begun = response
            self._client.on_held(slot, response)
            self._begun = None  # a large response must not stay in memory

    def _faulty_frame(self) -> FaultyFrame | None:
        """Returns the response that was read when an error was raised. None: it answers no request."""
        slot = self._slot
        if slot is None or self._begun is None:
            return None
        api_key = None if slot.is_raw_token else slot.api_key
        return FaultyFrame("broker", api_key=api_key, api_version=slot.api_version)


def _check_head(slot: Slot, part: FramePart) -> None:
    if part.size < RESPONSE_HEAD_BYTES:
        raise TruncatedError(f"a response of {part.size} bytes, which is too short for its header")
    correlation_id = INT32.unpack_from(part.data, LENGTH_BYTES)[0]
    if correlation_id != slot.upstream_correlation_id:
        raise CorrelationMismatchError(
            f"a response with correlation id {correlation_id}, but the next is {slot.upstream_correlation_id}"
        )


async def connect_upstream(context: ConnectionContext, endpoint: Endpoint, client: ClientSide) -> UpstreamConnection:
    """Tries each of the endpoint's addresses once, until `connect_deadline_ms` has passed.

    The addresses whose last attempt failed come last. So a broker whose machine is gone, which lets every attempt wait
    for `connect_timeout_ms`, delays no client that another broker can serve.

    If every address fails, the client's connection must close at once: the client then looks for another broker, as it
    does when the broker itself refuses. Raises `UpstreamUnavailableError`."""
    loop = asyncio.get_running_loop()
    limits = context.limits
    deadline_s = loop.time() + limits.connect_deadline_ms / 1000
    trouble = "no address is known"
    unreachable = context.unreachable
    for host, port in sorted(await _known_addresses(endpoint), key=unreachable.__contains__):
        left_s = deadline_s - loop.time()
        if left_s < LEAST_ATTEMPT_S:
            break
        upstream = UpstreamConnection(context, client)
        is_open = False
        try:
            async with asyncio.timeout(min(limits.connect_timeout_ms / 1000, left_s)):
                await _open(upstream, context, host, port)
            is_open = True
            unreachable.discard((host, port))
            return upstream
        except (OSError, ValueError) as error:  # a host name may be invalid
            if len(unreachable) >= MAX_UNREACHABLE:
                unreachable.clear()
            unreachable.add((host, port))
            context.metrics.upstream_connect_failures += 1
            trouble = f"{host}:{port}: {explain(error)}"
        finally:
            if not is_open:
                upstream.forget()
    raise UpstreamUnavailableError(trouble)


async def _open(upstream: UpstreamConnection, context: ConnectionContext, host: str, port: int) -> None:
    ssl = None if context.upstream_tls is None else context.upstream_tls.current()
    sock = await connected_socket(host, port)
    if ssl is None and context.pipes is not None:
        SocketTransport(sock, upstream, context.pipes, relaying=upstream)
        return
    name = None if ssl is None else host
    await asyncio.get_running_loop().create_connection(lambda: upstream, sock=sock, ssl=ssl, server_hostname=name)


async def _known_addresses(endpoint: Endpoint) -> Sequence[Address]:
    """Returns the endpoint's addresses. It waits a moment for those of a broker that joined just now."""
    for _ in range(UNKNOWN_BROKER_LOOKS):
        if addresses := endpoint.addresses():
            return addresses
        await asyncio.sleep(UNKNOWN_BROKER_PAUSE_S)
    return endpoint.addresses()
