"""The client's side of a connection: reads requests, writes answers in order, and closes both sockets in the end.

* Backpressure: the connection stops reading from the client while the broker is not connected, while the broker does
  not read, and while too many requests are in flight. It stashes the unprocessed rest of the last read, which is never
  more than one read buffer.
* The connection to the broker opens when the first request begins, so port checks and TLS handshakes never reach the
  broker.
* A client that closes its writing side still gets the answers to its requests in progress, for a limited time.
* When the broker closes its connection, the answers that are complete still leave. Then the client's connection closes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import cast

from protocol.api_keys import ApiKey
from protocol.errors import ProtocolError, TlsHandshakeError
from protocol.frame import frame_length
from protocol.primitives import Buffer
from proxy.wire.admission import Admission, address_of
from proxy.wire.context import ConnectionContext, ConnectionRegistry, Endpoint
from proxy.wire.error_log import FaultyFrame, Sender
from proxy.wire.exchange import Buffers, Prepare
from proxy.wire.flow_control import (
    DRAINING,
    NOT_CONNECTED,
    OUT_OF_TURN,
    PEER_IS_FULL,
    READ_BUFFER_BYTES,
    Outlet,
    ReadGate,
)
from proxy.wire.request_reader import RequestReader
from proxy.wire.response_queue import ResponseQueue, Slot
from proxy.wire.upstream import UpstreamConnection, UpstreamUnavailableError, connect_upstream

logger = logging.getLogger(__name__)

_connection_ids = itertools.count(1)


class ClientConnection(asyncio.BufferedProtocol):
    def __init__(
        self,
        context: ConnectionContext,
        endpoint: Endpoint,
        registry: ConnectionRegistry[ClientConnection],
        admission: Admission | None = None,
    ) -> None:
        """`admission` is the place that the TLS listener took. None: `connection_made` asks for one."""
        self.connection_id = next(_connection_ids)
        self.queue = ResponseQueue(context.limits.max_in_flight)
        self.last_active_s = 0.0
        self.relays_blindly = False
        self.is_full = False
        """The client does not read. Until it does, no further response begins, so that none is built in vain."""
        self._context = context
        self._endpoint = endpoint
        self._registry = registry
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(context, self, self.queue, self._must_wait, self._prepare)
        self._gate = ReadGate()
        self._outlet = Outlet(context.buffers)
        self._to_client: list[Buffer] = []
        self._on_sent: list[Callable[[], None]] = []
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._upstream_is_gone = False
        self._is_draining = False
        self._has_ended = False
        self._is_closing = False
        self._close_cause = "client"
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def node_id(self) -> int | None:
        return self._endpoint.node_id

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        transport = self._transport = cast(asyncio.Transport, transport)
        self._outlet.attach(transport)
        self._gate.attach(transport)
        self.last_active_s = self._loop.time()
        if self._admission is None:
            admitted = self._context.admissions.admit(address_of(transport.get_extra_info("peername")))
            if isinstance(admitted, str):
                self._context.metrics.rejected_connections += 1
                logger.warning("connection refused: the limit %s is reached", admitted, extra=self._who())
                transport.abort()
                return
            self._admission = admitted
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
            self._reader.read(data)
            self._advance()
        except Exception as error:
            self.fail("client", error, self._reader.faulty_frame)

    def eof_received(self) -> bool:
        self._has_ended = True
        self._advance()
        if self._transport is not None and self._transport.get_extra_info("ssl_object") is not None:
            return False  # asyncio's TLS does not support half-closed connections
        if not self._is_closing:
            self._start_timer(self._context.limits.half_close_timeout_ms, "half_closed")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._outlet.on_lost()
        self._flush(aliases_pool=False)
        if self._timer is not None:
            self._timer.cancel()
        self._stop_send_timer()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()
        self.queue.abandon_all()
        self._reader.abandon()
        if self._admission is not None:
            self._admission.give_back()
        if self in self._registry:
            self._registry.discard(self)
            self._context.metrics.open_connections -= 1
            self._context.metrics.closed[self._close_cause] += 1

    def pause_writing(self) -> None:
        self.is_full = True
        if self._send_timer is None:
            self._start_send_timer()
        if self._upstream is not None:
            self._upstream.gate.pause(PEER_IS_FULL)

    def resume_writing(self) -> None:
        if not self._outlet.on_drained():
            return
        self.is_full = False
        self._stop_send_timer()
        if self._upstream is not None:
            self._upstream.unblock()
            if not self.is_full:
                self._upstream.gate.resume(PEER_IS_FULL)

    def _start_send_timer(self) -> None:
        timeout_s = self._context.limits.send_timeout_ms / 1000
        self._send_timer = self._loop.call_later(timeout_s, self._check_sent, self._outlet.sent_bytes)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_sent(self, sent_bytes: int) -> None:
        """Closes the connection unless the client has received a buffer's worth since `sent_bytes` had left.

        A few bytes are no progress: a client that reads a byte now and then would occupy the memory for hours."""
        if self._outlet.sent_bytes >= sent_bytes + READ_BUFFER_BYTES:
            self._start_send_timer()
            return
        logger.warning(
            "closing the connection: the client does not receive its responses (limits.send.timeout.ms)",
            extra=self._who(),
        )
        self.abort("stalled")

    def _must_wait(self) -> bool:
        """Returns whether the next request must wait, and then pauses reading until the request may go on."""
        if self._is_draining:
            self._gate.pause(DRAINING)
            return True
        if self._upstream is None or self._upstream_is_gone:
            self._gate.pause(NOT_CONNECTED)
            if self._connecting is None:
                self._connecting = self._context.spawn(self._connect())
            return True
        if self.queue.is_full or self._reader.awaits_raw_tokens or self._reader.is_preparing:
            self._gate.pause(OUT_OF_TURN)
            return True
        return False

    def try_forward(self, slot: Slot, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        return None if self._upstream_is_gone or self._is_closing else self._reader.try_forward(slot, frame)

    def _prepare(self, slot: Slot, prepare: Prepare) -> None:
        slot.task = self._context.spawn(self._send_prepared(slot, prepare))

    async def _send_prepared(self, slot: Slot, prepare: Prepare) -> None:
        try:
            action = await prepare.forward()
        except asyncio.CancelledError:
            self.fail("client", RuntimeError("a request's preparation was cancelled"))
            raise
        except Exception as error:
            self.fail("client", error)
            return
        finally:
            slot.task = None
        if self._is_closing or self._upstream_is_gone:
            self._advance()
            return
        self._reader.send_prepared(slot, action)
        self.unblock()

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
        self._upstream = self._reader.upstream = upstream
        self.unblock()

    def pause_requests(self) -> None:
        """Pauses reading from the client, because the broker does not read."""
        self._gate.pause(PEER_IS_FULL)

    def resume_requests(self) -> None:
        self._gate.resume(PEER_IS_FULL)

    def unblock(self) -> None:
        """Processes stashed requests, up to the first that must wait."""
        if self._is_closing:
            return
        try:
            if self.relays_blindly:
                if (raw := self._reader.take_stash()) and self._upstream is not None:
                    self._upstream.send(raw, aliases_pool=False)
            else:
                self._reader.read_stashed()
        except Exception as error:
            self.fail("client", error, self._reader.faulty_frame)
            return
        if not self._reader.has_stash:
            self._gate.resume(NOT_CONNECTED)
            self._gate.resume(OUT_OF_TURN)
        self._advance()

    def on_authentication(self) -> None:
        self.connection_id = next(_connection_ids)

    def _begin_raw_tokens(self, count: int | None) -> None:
        """Begins the raw tokens that follow SaslHandshake v0 (docs/semantics.md 1.4).

        The next `count` frames of the client, and the broker's answers to them, have no header. None: the number is
        unknown. The proxy can then no longer find the requests, so it relays all bytes unread."""
        self._reader.awaits_raw_tokens = False
        if count is not None:
            self._reader.raw_tokens = count
            return
        logger.warning(
            "the end of the client's SASL tokens is unknown (SaslHandshake v0): the proxy relays this connection "
            "unread, and does not rewrite broker addresses",
            extra=self._who(),
        )
        self.relays_blindly = True

    def on_upstream_gone(self) -> None:
        self._upstream_is_gone = True
        self._advance()

    def emit(self, buffers: Buffers) -> None:
        """Queues bytes of the response whose turn it is. They leave with the next `commit_answers`."""
        self._to_client += buffers

    def on_streamed(self, slot: Slot) -> None:
        """Removes the head slot, because the last byte of its response was emitted."""
        slots = self.queue.slots
        slots.popleft()
        slot.state = None
        self._observe(slot)
        if slot.api_key == ApiKey.SASL_AUTHENTICATE:
            self._reader.is_authenticated = True
        if slot.raw_tokens_after != 0:
            self._begin_raw_tokens(slot.raw_tokens_after)
        if slots and slots[0].answer is not None:
            self._emit_answers()

    def on_held(self, slot: Slot, response: memoryview) -> None:
        """Gives the head slot's complete response to its handler. No byte of it was emitted."""
        assert slot.state is not None
        result = slot.state.on_response(response)
        if isinstance(result, Coroutine):
            slot.runs(self._context.spawn(self._finish(slot, result)), result)
            return
        slot.answer = result
        self._emit_answers()

    async def _finish(self, slot: Slot, answer: Coroutine[None, None, Buffers]) -> None:
        try:
            slot.answer = await answer
        except asyncio.CancelledError:
            # If the connection neither closes nor drains, something that the handler awaited was cancelled.
            if slot.answer is None:
                self.fail("client", RuntimeError("the answer was cancelled"))
            raise
        except Exception as error:
            self.fail("client", error)
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
            if slot.on_sent is not None:
                self._on_sent.append(slot.on_sent)
            self._observe(slot)

    def commit_answers(self, *, aliases_pool: bool) -> None:
        slots = self.queue.slots
        if slots and slots[0].answer is not None:
            self._emit_answers()
        self._flush(aliases_pool=aliases_pool)

    def _flush(self, *, aliases_pool: bool) -> None:
        if self._to_client:
            buffers, self._to_client = self._to_client, []
            on_sent, self._on_sent = self._on_sent, []
            self._outlet.write(buffers, aliases_pool=aliases_pool, on_sent=on_sent)

    def relay(self, data: memoryview) -> None:
        """Sends bytes of the broker to the client unread."""
        self._outlet.write([data], aliases_pool=True)

    def _observe(self, slot: Slot) -> None:
        self._context.metrics.observe(slot.api_key, slot.tier, self._loop.time() - slot.started_s)

    def advance(self) -> None:
        """Continues after responses have left: processes requests that waited for room, and closes if it is time."""
        if self._reader.has_stash and not self.queue.is_full:
            self.unblock()
        else:
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
            if self._is_draining and not self._reader.is_mid_frame:
                self.close("drained")
            elif self._has_ended and (not self._reader.has_stash or self._reader.awaits_raw_tokens):
                self.close("client")

    def drain(self) -> None:
        """Takes no more requests, answers those in progress, then closes."""
        if self._is_draining:
            return
        self._is_draining = True
        if self.relays_blindly:
            self.close("drained")
            return
        if not self._reader.is_mid_frame:
            self._gate.pause(DRAINING)
        streaming = None if self._upstream is None else self._upstream.streaming_slot
        for slot in self.queue.slots:
            build = self._context.drain_answers.get(slot.api_key)
            if build is not None and slot.answer is None and slot is not streaming:
                slot.abandon()
                slot.answer = build(slot.api_version, slot.correlation_id)
        if self._upstream is not None:
            self._upstream.unblock()
        self.advance()

    def close(self, cause: str) -> None:
        """Closes when all written bytes have left, at the latest after the close timeout."""
        if self._is_closing:
            return
        self._is_closing = True
        self._close_cause = cause
        if self._transport is not None:
            self._start_timer(self._context.close_timeout_ms, cause)
            self._outlet.close()
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

    def fail(self, peer: Sender, error: Exception, frame: FaultyFrame | None = None) -> None:
        """Logs the error in one line, sends the answers that are complete, then closes both connections.

        `frame` is the one that cannot be decoded, if the error concerns one."""
        if self._is_closing:
            return
        log_failure(logger, peer, error, self._who())
        self._note_failure(error, frame)
        self.commit_answers(aliases_pool=True)
        self.close("protocol_error" if isinstance(error, ProtocolError) else "handler_error")

    def _note_failure(self, error: Exception, frame: FaultyFrame | None) -> None:
        errors = self._context.errors
        if isinstance(error, ProtocolError):
            errors.note("undecodable", error, peer=self._peer(), node_id=self.node_id, frame=frame)
        else:  # the text of such an error may have anything in it
            reason = f"a request handler failed: {type(error).__name__}"
            errors.note("closed", reason, peer=self._peer(), node_id=self.node_id)

    def _peer(self) -> str | None:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else None

    def _who(self) -> dict[str, object]:
        return {"connection_id": self.connection_id, "node_id": self.node_id, "client": self._peer()}


def log_failure(logger: logging.Logger, peer: str, error: Exception, who: Mapping[str, object]) -> None:
    """`peer` is the sender of the faulty bytes: "client" or "broker"."""
    match error:
        case TlsHandshakeError() if peer == "broker":
            logger.warning("closing the connection: the broker speaks TLS: set [upstream.tls]", extra=who)
        case TlsHandshakeError():
            logger.warning(
                "a client speaks TLS on this plain-text port: set security.protocol=PLAINTEXT (or SASL_PLAINTEXT) "
                "in the client, or give the proxy a certificate ([listener.tls])",
                extra=who,
            )
        case ProtocolError():
            logger.warning("closing the connection: the %s sent %s", peer, error, extra=who)
        case _:
            logger.error("closing the connection: a request handler failed", exc_info=error, extra=who)
