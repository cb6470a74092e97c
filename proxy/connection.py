"""The client's side of a connection: requests in, answers out in order, and the life of the pair of sockets.

* Nothing is read from a client while its bytes could not go on: no broker yet, a broker that stalls, too many requests
  in flight. What one read has brought beyond that is stashed: never more than one read buffer.
* A broker is connected when the first frame has begun, so that port checks and TLS handshakes never reach it.
* A client that has closed its writing side gets the answers that are under way, for a while.
* When the broker is gone, what is answered already still leaves; then the client's connection closes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Sequence
from typing import cast

from protocol.api_keys import ApiKey
from protocol.errors import FrameSizeError, ProtocolError, TlsHandshakeError, TruncatedError
from protocol.frame import LENGTH_BYTES, REQUEST_HEAD_BYTES, FramePart, FrameTracker, frame_length
from protocol.header import parse_request_head
from protocol.primitives import Buffer
from proxy.context import ConnectionContext, ConnectionRegistry, Endpoint
from proxy.exchange import Answer, Buffers, Handler, PrefixHandler, Request
from proxy.flow_control import DRAINING, NOT_CONNECTED, OUT_OF_TURN, PEER_IS_FULL, Outlet, ReadGate, owned_parts
from proxy.response_queue import ResponseQueue, Slot
from proxy.upstream import UpstreamConnection, UpstreamUnavailableError, connect_upstream

logger = logging.getLogger(__name__)

MAX_PREFIX_BYTES = 128 * 1024
"""A client id and a transactional id, 32 KiB each at most, and what surrounds them."""

_connection_ids = itertools.count(1)


class ClientConnection(asyncio.BufferedProtocol):
    def __init__(
        self, context: ConnectionContext, endpoint: Endpoint, registry: ConnectionRegistry[ClientConnection]
    ) -> None:
        self.connection_id = next(_connection_ids)
        self.queue = ResponseQueue(context.limits.max_in_flight)
        self.last_active_s = 0.0
        self.relays_blindly = False
        self._context = context
        self._endpoint = endpoint
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tracker = FrameTracker(REQUEST_HEAD_BYTES, context.limits.max_request_bytes)
        self._gate = ReadGate()
        self._outlet = Outlet(context.buffers)
        self._to_client: list[Buffer] = []
        self._to_broker: list[Buffer] = []
        self._stash: list[FramePart] = []
        self._partial: bytearray | None = None
        """A request that is held until it is complete, or a prefix until it tells enough."""
        self._frame_slot: Slot | None = None
        self._is_mid_frame = False
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._upstream_is_gone = False
        self._awaits_blind_relay = False
        self._is_draining = False
        self._has_ended = False
        self._is_closing = False
        self._close_cause = "client"
        self._timer: asyncio.TimerHandle | None = None

    @property
    def node_id(self) -> int | None:
        return self._endpoint.node_id

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        transport = self._transport = cast(asyncio.Transport, transport)
        self._outlet.attach(transport)
        self._gate.attach(transport)
        self.last_active_s = self._loop.time()
        limit = self._context.limits.max_connections
        if limit and len(self._registry) >= limit:
            self._context.metrics.rejected_connections += 1
            logger.warning("connection refused: limits.max_connections is reached", extra=self._who())
            transport.abort()
            return
        self._registry.add(self)
        self._context.metrics.accepted_connections += 1
        self._context.metrics.open_connections += 1

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._context.buffers.current

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active_s = self._loop.time()
        self._context.metrics.bytes_from_clients += nbytes
        data = self._context.buffers.current[:nbytes]
        if self.relays_blindly:
            if self._upstream is not None:
                self._upstream.send([data], aliases_pool=True)
            return
        try:
            self._process(self._tracker.feed(data), aliases_pool=True)
        except Exception as error:
            self._fail(error)

    def eof_received(self) -> bool:
        self._has_ended = True
        self._advance()
        if not self._is_closing:
            self._start_timer(self._context.limits.half_close_timeout_ms, "half_closed")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._outlet.on_drained()
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()
        self.queue.abandon_all()
        if self._frame_slot is not None:
            self._frame_slot.abandon()
            self._frame_slot = None
        if self in self._registry:
            self._registry.discard(self)
            self._context.metrics.open_connections -= 1
            self._context.metrics.closed[self._close_cause] += 1

    def pause_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.gate.pause(PEER_IS_FULL)

    def resume_writing(self) -> None:
        self._outlet.on_drained()
        if self._upstream is not None:
            self._upstream.gate.resume(PEER_IS_FULL)

    # Requests

    def _process(self, parts: Sequence[FramePart], *, aliases_pool: bool) -> None:
        for index, part in enumerate(parts):
            if part.is_start:
                if self._must_wait():
                    self._stash = owned_parts(parts[index:], copy=aliases_pool)
                    break
                self._begin(part)
            elif self._partial is not None:
                self._partial += part.data
                self._examine(self._partial, part.remaining)
            else:
                self._to_broker.append(part.data)
            self._is_mid_frame = part.remaining > 0
        self._commit_requests(aliases_pool=aliases_pool)
        self._advance()

    def _must_wait(self) -> bool:
        if self._is_draining:
            self._gate.pause(DRAINING)
            return True
        if self._upstream is None or self._upstream_is_gone:
            self._gate.pause(NOT_CONNECTED)
            if self._connecting is None:
                self._connecting = self._context.spawn(self._connect())
            return True
        if self.queue.is_full or self._awaits_blind_relay:
            self._gate.pause(OUT_OF_TURN)
            return True
        return False

    def _begin(self, part: FramePart) -> None:
        api_key, api_version, correlation_id = parse_request_head(part.data[LENGTH_BYTES:])
        context = self._context
        context.metrics.requests[api_key] += 1
        slot = Slot(self, api_key, api_version, correlation_id, self._loop.time())
        handled = api_key in context.router.handlers
        if not handled and api_key not in context.router.prefix_handlers:
            if api_key == ApiKey.SASL_HANDSHAKE and api_version == 0:
                slot.relays_blindly_after = self._awaits_blind_relay = True
            self.queue.push_sent(slot)
            self._to_broker.append(part.data)
            return
        if handled and part.size > context.limits.max_held_request_bytes:
            raise FrameSizeError(f"a request of {part.size} bytes with API key {api_key}: above the limit of held ones")
        slot.request = Request(api_key, api_version, correlation_id, b"", context.clock_ms())
        self._frame_slot = slot
        self._examine(part.data, part.remaining)

    def _examine(self, frame: memoryview | bytearray, remaining: int) -> None:
        """`frame` is what has come of it, length prefix included."""
        slot = self._frame_slot
        assert slot is not None
        handler = self._context.router.handlers.get(slot.api_key)
        if handler is None:
            by_prefix = self._context.router.prefix_handlers[slot.api_key]
            finished = self._decide_by_prefix(by_prefix, slot, frame, remaining)
        else:
            finished = not remaining
            if finished:
                slot.request.frame = bytes(memoryview(frame)[LENGTH_BYTES:])
                self._decide(handler, slot)
        if finished:
            self._frame_slot = None
            self._partial = None
        elif self._partial is None:
            self._partial = bytearray(frame)

    def _decide(self, handler: Handler, slot: Slot) -> None:
        action, slot.state = handler.on_request(slot)
        if isinstance(action, Answer):
            slot.answer = action.payload
            self.queue.push_answered(slot)
            return
        slot.hold_bytes = action.hold_bytes
        slot.patcher = action.patcher
        slot.upstream_correlation_id = parse_request_head(action.frame).correlation_id
        self._enqueue_sent(slot, action.no_response)
        self._to_broker += (frame_length(action.frame), action.frame)

    def _decide_by_prefix(
        self, handler: PrefixHandler, slot: Slot, frame: memoryview | bytearray, remaining: int
    ) -> bool:
        try:
            action, slot.state = handler.on_prefix(slot, memoryview(frame)[LENGTH_BYTES:])
        except TruncatedError:
            if remaining and len(frame) < MAX_PREFIX_BYTES:
                return False
            raise
        slot.hold_bytes = action.hold_bytes
        self._enqueue_sent(slot, action.no_response)
        self._to_broker.append(frame)
        return True

    def _enqueue_sent(self, slot: Slot, no_response: bool) -> None:
        if no_response:
            self.queue.last_sent = slot
        else:
            self.queue.push_sent(slot)

    def _commit_requests(self, *, aliases_pool: bool) -> None:
        if self._to_broker and self._upstream is not None:
            buffers, self._to_broker = self._to_broker, []
            self._upstream.send(buffers, aliases_pool=aliases_pool)

    def try_forward(self, slot: Slot, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        upstream = self._upstream
        if upstream is None or self._upstream_is_gone or self._is_closing:
            return None
        if self.queue.last_sent is not slot or (self._is_mid_frame and self._partial is None):
            return None
        head = parse_request_head(frame)
        ours = Slot(self, head.api_key, head.api_version, head.correlation_id, self._loop.time())
        ours.hold_bytes = None
        ours.future = self._loop.create_future()
        self.queue.awaiting.append(ours)
        self._to_broker += (frame_length(frame), frame)
        self._commit_requests(aliases_pool=False)
        return _result_of(ours.future)

    # The broker's side

    async def _connect(self) -> None:
        try:
            upstream = await connect_upstream(self._context, self._endpoint, self)
        except UpstreamUnavailableError as error:
            logger.warning("broker unreachable, closing the client's connection: %s", error, extra=self._who())
            self.close("upstream_unreachable")
            return
        if self._is_closing:
            upstream.close()
            return
        self._upstream = upstream
        self.unblock()

    def pause_requests(self) -> None:
        """The broker takes no more bytes for now."""
        self._gate.pause(PEER_IS_FULL)

    def resume_requests(self) -> None:
        self._gate.resume(PEER_IS_FULL)

    def unblock(self) -> None:
        """Goes on with stashed requests, as far as they may go now."""
        if self._is_closing or (not self._stash and not self.relays_blindly):
            return
        stash, self._stash = self._stash, []
        try:
            if self.relays_blindly:
                if stash and self._upstream is not None:
                    self._upstream.send([part.data for part in stash], aliases_pool=False)
            else:
                self._process(stash, aliases_pool=False)
        except Exception as error:
            self._fail(error)
            return
        if not self._stash:
            self._gate.resume(NOT_CONNECTED)
            self._gate.resume(OUT_OF_TURN)

    def begin_blind_relay(self) -> None:
        """After SaslHandshake v0 both sides speak raw tokens: nothing can be told apart any more (semantics 1.4)."""
        logger.warning("SaslHandshake v0: relaying blindly, broker addresses are not rewritten", extra=self._who())
        self.relays_blindly = True
        self._awaits_blind_relay = False

    def on_upstream_gone(self) -> None:
        self._upstream_is_gone = True
        self._advance()

    # Answers

    def emit(self, buffers: Buffers) -> None:
        """Bytes of the response whose turn it is; they leave with the next `commit_answers`."""
        self._to_client += buffers

    def on_streamed(self, slot: Slot) -> None:
        """The last byte of the head slot's response was emitted."""
        self.queue.slots.popleft()
        slot.state = None
        self._observe(slot)
        if slot.relays_blindly_after:
            self.begin_blind_relay()
        self._emit_answers()

    def on_held(self, slot: Slot, response: memoryview) -> None:
        """The head slot's response is complete and has not been emitted."""
        assert slot.state is not None
        result = slot.state.on_response(response)
        if isinstance(result, Coroutine):
            slot.task = self._context.spawn(self._finish(slot, result))
            return
        slot.answer = result
        self._emit_answers()

    async def _finish(self, slot: Slot, answer: Coroutine[None, None, Buffers]) -> None:
        try:
            slot.answer = await answer
        except asyncio.CancelledError:
            # Not ours unless the connection ends or drains: something that the handler awaited was cancelled.
            if slot.answer is None:
                self._fail(RuntimeError("the answer was cancelled"))
            raise
        except Exception as error:
            self._fail(error)
            return
        finally:
            slot.task = None
        self.commit_answers(aliases_pool=False)
        if self._upstream is not None:
            self._upstream.unblock()
        self._advance()

    def _emit_answers(self) -> None:
        for slot in self.queue.take_answered():
            assert slot.answer is not None
            self._to_client.append(frame_length(*slot.answer))
            self._to_client += slot.answer
            self._observe(slot)

    def commit_answers(self, *, aliases_pool: bool) -> None:
        self._emit_answers()
        if self._to_client:
            buffers, self._to_client = self._to_client, []
            self._outlet.write(buffers, aliases_pool=aliases_pool)

    def relay(self, data: memoryview) -> None:
        """Bytes of a blind relay."""
        self._outlet.write([data], aliases_pool=True)

    def _observe(self, slot: Slot) -> None:
        self._context.metrics.observe(slot.api_key, slot.tier, self._loop.time() - slot.started_s)

    # The end

    def advance(self) -> None:
        """After responses have been taken: requests that waited for room go on, and an end that is due comes."""
        if self._stash and not self.queue.is_full:
            self.unblock()
        self._advance()

    def _advance(self) -> None:
        self.commit_answers(aliases_pool=False)
        if self._is_closing:
            return
        slots = self.queue.slots
        upstream = self._upstream
        if self._upstream_is_gone:
            if (not slots or slots[0].awaits_broker) and not (upstream is not None and upstream.has_stash):
                self.close("broker")
        elif (self._has_ended or self._is_draining) and not slots:
            if self._is_draining and not self._is_mid_frame:
                self.close("drained")
            elif self._has_ended and (not self._stash or self._awaits_blind_relay):
                self.close("client")

    def drain(self) -> None:
        """Takes no more requests, answers what is under way, then closes."""
        if self._is_draining:
            return
        self._is_draining = True
        if self.relays_blindly:
            self.close("drained")
            return
        if not self._is_mid_frame:
            self._gate.pause(DRAINING)
        streaming = None if self._upstream is None else self._upstream.streaming_slot
        for slot in self.queue.slots:
            build = self._context.early_answers.get(slot.api_key)
            if build is not None and slot.answer is None and slot is not streaming:
                slot.abandon()
                slot.answer = build(slot.api_version, slot.correlation_id)
        if self._upstream is not None:
            self._upstream.unblock()
        self.advance()

    def close(self, cause: str) -> None:
        """Closes once what has been written has left, at the latest after the close timeout."""
        if self._is_closing:
            return
        self._is_closing = True
        self._close_cause = cause
        if self._transport is not None:
            self._start_timer(self._context.limits.close_timeout_ms, cause)
            self._transport.close()
        if self._upstream is not None:
            self._upstream.close()

    def abort(self, cause: str) -> None:
        self._is_closing = True
        self._close_cause = cause
        if self._transport is not None:
            self._transport.abort()

    def _start_timer(self, timeout_ms: int, cause: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(timeout_ms / 1000, self.abort, cause)

    def _fail(self, error: Exception) -> None:
        self.fail("client", error)

    def fail(self, peer: str, error: Exception) -> None:
        """One line that says what is wrong, then the end of both connections."""
        if self._is_closing:
            return
        match error:
            case TlsHandshakeError():
                logger.warning(
                    "a client speaks TLS on this plain-text port: set security.protocol=PLAINTEXT (or SASL_PLAINTEXT) "
                    "in the client, or end TLS in front of the proxy",
                    extra=self._who(),
                )
            case ProtocolError():
                logger.warning("closing the connection: the %s sent %s", peer, error, extra=self._who())
            case _:
                logger.error("closing the connection: a handler failed", exc_info=error, extra=self._who())
        self.close("protocol_error" if isinstance(error, ProtocolError) else "handler_error")

    def _who(self) -> dict[str, object]:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return {
            "connection_id": self.connection_id,
            "node_id": self.node_id,
            "client": f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else None,
        }


async def _result_of(future: asyncio.Future[memoryview]) -> memoryview:
    return await future
