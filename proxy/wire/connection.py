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
from collections.abc import Callable, Coroutine
from typing import cast

from protocol.addresses import AddressOf
from protocol.errors import ProtocolError
from protocol.frame import FramePart, frame_length
from protocol.primitives import Buffer
from proxy.wire.admission import Admission
from proxy.wire.connection_log import ConnectionReport
from proxy.wire.context import Address, ConnectionContext, ConnectionRegistry, Endpoint
from proxy.wire.error_log import FaultyFrame, Sender
from proxy.wire.exchange import BrokerGoneError, Buffers, Prepare
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
from proxy.wire.sasl_exchange import BEFORE_AUTHENTICATION
from proxy.wire.tls import named_host
from proxy.wire.upstream import UpstreamConnection, UpstreamUnavailableError, connect_upstream

_connection_ids = itertools.count(1)


class ClientConnection(asyncio.BufferedProtocol):
    def __init__(
        self,
        context: ConnectionContext,
        endpoint: Endpoint,
        registry: ConnectionRegistry[ClientConnection],
        admission: Admission,
        client: Address | None,
    ) -> None:
        """`client` is the client's own address, also behind a load balancer."""
        self.connection_id = next(_connection_ids)
        self.queue = ResponseQueue(context.limits.max_in_flight)
        self.last_active_s = 0.0
        self.is_full = False
        """The client does not read. Until it does, no further response begins, neither the broker's nor the proxy's."""
        self._context = context
        self._endpoint = endpoint
        self._registry = registry
        self._admission = admission
        self._report = ConnectionReport(context.log, context.errors, self, client)
        self._is_proven = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(context, self, self.queue, self._must_wait, self._prepare)
        self._gate = ReadGate()
        self.outlet = Outlet(context.buffers)
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
        self._again: asyncio.Handle | None = None
        """The next turn of `advance`, in which stashed requests go on."""

    @property
    def node_id(self) -> int | None:
        return self._endpoint.node_id

    @property
    def address_of(self) -> AddressOf:
        return self._endpoint.address_of

    @property
    def client_id(self) -> str | None:
        return self._reader.client_id

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        transport = cast(asyncio.Transport, transport)
        if transport.is_closing():
            return  # the listener has ended it, while it was being opened
        self._transport = transport
        self._endpoint = self._endpoint.named(named_host(transport))
        self.outlet.attach(transport)
        self._gate.attach(transport)
        self.last_active_s = self._loop.time()
        self._admission.give_way = lambda limit: self.end(limit.cause, limit.said)
        self._registry.add(self)
        self._context.metrics.accepted_connections += 1
        self._context.metrics.open_connections += 1

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._context.buffers.current

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active_s = self._loop.time()
        self._context.metrics.bytes_from_clients += nbytes
        data = self._context.buffers.current[:nbytes]
        if self._reader.pass_on(data):
            return
        try:
            self._reader.read(data)
        except Exception as error:
            self.fail("client", error, self._reader.faulty_frame)
            return
        self.advance()

    @property
    def paused_fd(self) -> int | None:
        """The client's socket while the proxy does not read from it. None: it reads, or the connection ends anyway."""
        return None if self._is_closing or self._timer is not None else self._gate.paused_fd

    def eof_received(self) -> bool:
        self._has_ended = True
        self.advance()
        if self._transport is not None and self._transport.get_extra_info("ssl_object") is not None:
            return False  # asyncio's TLS does not support half-closed connections
        self.half_close()
        return True

    def half_close(self) -> None:
        if not self._is_closing:
            self._start_timer(self._context.limits.half_close_timeout_ms, "half_closed")

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self.outlet.on_lost()
        self._flush(aliases_pool=False)
        if self._timer is not None:
            self._timer.cancel()
        self._stop_send_timer()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()
            self._upstream.drop_responses()
        self.queue.abandon_all()
        self._reader.abandon()
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
        if not self.outlet.on_drained():
            return
        self.is_full = False
        self.last_active_s = self._loop.time()
        self._stop_send_timer()
        self.commit_answers(aliases_pool=False)
        if self._upstream is not None and not self.is_full:
            self._upstream.unblock()
            if not self.is_full:
                self._upstream.gate.resume(PEER_IS_FULL)
        self.advance()

    def _start_send_timer(self) -> None:
        due_s = self._loop.time() + self._context.limits.send_timeout_ms / 1000
        self._send_timer = self._loop.call_at(due_s, self._check_sent, self.outlet.sent_bytes)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_sent(self, sent_bytes: int) -> None:
        """Closes the connection unless the client has received a buffer's worth since `sent_bytes` had left.

        A few bytes are no progress: a client that reads a byte now and then would occupy the memory for hours."""
        if self.outlet.sent_bytes >= sent_bytes + READ_BUFFER_BYTES:
            self._start_send_timer()
            return
        self.end("stalled", "the client does not receive its responses")

    def _must_wait(self, part: FramePart) -> bool:
        """Returns whether the next request must wait, and then pauses reading until the request may go on."""
        if self._may_go_on() and self._reader.may_hold(part, self.advance, is_full=self.is_full):
            return False
        if self._is_draining:
            self._gate.pause(DRAINING)
        elif self._upstream is None or self._upstream_is_gone:
            self._gate.pause(NOT_CONNECTED)
            if self._connecting is None:
                self._connecting = self._context.spawn(self._connect())
        else:
            self._gate.pause(OUT_OF_TURN)
        return True

    def _may_go_on(self) -> bool:
        """Returns whether the next request may begin."""
        return not (
            self._upstream is None
            or self._upstream_is_gone
            or (self._is_draining and not self._reader.is_mid_frame)
            or self.queue.is_full
            or (self.is_full and self.queue.has_answer)
            or self._reader.sasl.awaits_answer
            or (self._reader.sasl.is_doubtful and self.queue.slots)
            or self._reader.is_preparing
        )

    def try_forward(self, slot: Slot, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        return None if self._upstream_is_gone or self._is_closing else self._reader.try_forward(slot, frame)

    def _prepare(self, slot: Slot, prepare: Prepare) -> None:
        slot.task = self._context.spawn(self._send_prepared(slot, prepare))

    async def _send_prepared(self, slot: Slot, prepare: Prepare) -> None:
        try:
            action = await prepare.decide()
        except asyncio.CancelledError:
            if slot.answer is None:  # otherwise the drain has answered
                self.fail("client", RuntimeError("a request's preparation was cancelled"))
            raise
        except BrokerGoneError:
            action = None
        except Exception as error:
            self.fail("client", error)
            return
        finally:
            slot.task = None
        if action is not None and not self._is_closing and not self._upstream_is_gone:
            self._reader.send_prepared(slot, action)
        self.advance()

    async def _connect(self) -> None:
        try:
            upstream = await connect_upstream(self._context, self._endpoint, self)
        except UpstreamUnavailableError as error:
            self._report.tell("upstream_unreachable", f"broker unreachable, closing the client's connection: {error}")
            self.close("upstream_unreachable")
            return
        if self._is_closing:
            upstream.close()
            return
        self._upstream = self._reader.upstream = upstream
        self.advance()

    def pause_requests(self) -> None:
        """Pauses reading from the client, because the broker does not read."""
        self._gate.pause(PEER_IS_FULL)

    def resume_requests(self) -> None:
        self._gate.resume(PEER_IS_FULL)

    def on_authentication(self) -> None:
        self.connection_id = next(_connection_ids)

    def on_upstream_gone(self) -> None:
        self._upstream_is_gone = True
        self.advance()

    def emit(self, buffers: Buffers) -> None:
        """Queues bytes of the response whose turn it is. They leave with the next `commit_answers`."""
        self._to_client += buffers

    @property
    def can_splice(self) -> bool:
        return self.outlet.can_splice

    def splice(self, fd: int, max_bytes: int) -> int | None:
        return self.outlet.splice(fd, max_bytes)

    def on_streamed(self, slot: Slot) -> None:
        """Removes the head slot, because the last byte of its response was emitted."""
        self._reader.sasl.on_answer(slot.api_key)
        self.queue.slots.popleft()
        self._observe(slot)
        if self.queue.has_answer and not self.is_full:
            self._emit_answers()

    def on_held(self, slot: Slot, response: memoryview) -> None:
        """Gives the head slot's complete response to its handler. No byte of it was emitted."""
        assert slot.respond is not None
        self._reader.sasl.on_answer(slot.api_key)
        passes = slot.passes is not None and slot.passes(response)
        result = (response,) if passes else slot.respond(response)
        if isinstance(result, Coroutine):
            slot.runs(self._context.spawn(self._finish(slot, result)), result)
            return
        slot.complete(result, self._context.responses)
        if not self.is_full:
            self._emit_answers()

    async def _finish(self, slot: Slot, answer: Coroutine[None, None, Buffers]) -> None:
        try:
            slot.complete(await answer, self._context.responses)
        except asyncio.CancelledError:
            # If the connection neither closes nor drains, something that the handler awaited was cancelled.
            if slot.answer is None:
                self.fail("client", RuntimeError("the answer was cancelled"))
            raise
        except BrokerGoneError:
            pass  # without an answer, the connection closes
        except Exception as error:
            self.fail("client", error)
            return
        finally:
            slot.task = None
        slot.release()
        self.commit_answers(aliases_pool=False)
        if self._upstream is not None:
            self._upstream.unblock()
        self.advance()

    def _emit_answers(self) -> None:
        """Queues the complete answers whose turn it is. While the client does not read, the callers leave them waiting:
        the queue is then full in the end, and the connection no longer reads from the client."""
        while self.queue.has_answer:
            slot = self.queue.slots.popleft()
            assert slot.answer is not None
            self._to_client.append(frame_length(*slot.answer))
            self._to_client += slot.answer
            if slot.on_sent is not None:
                self._on_sent.append(slot.on_sent)
            self._observe(slot)

    def commit_answers(self, *, aliases_pool: bool) -> None:
        if not self.is_full:
            self._emit_answers()
        if self._to_client:
            self._flush(aliases_pool=aliases_pool)

    def _flush(self, *, aliases_pool: bool) -> None:
        if self._to_client:
            buffers, self._to_client = self._to_client, []
            on_sent, self._on_sent = self._on_sent, []
            self.outlet.write(buffers, aliases_pool=aliases_pool, on_sent=on_sent)

    def _observe(self, slot: Slot) -> None:
        slot.release()
        self._context.metrics.observe(slot.api_key, slot.tier, self._loop.time() - slot.started_s)

    def advance(self) -> None:
        """Continues as far as possible: answers leave, then requests that waited go on, then the connection may close.

        Whatever ends a wait calls this: a response, an answer, a drained client, a connected broker."""
        self._again = None
        if not self._is_proven:
            self._look_whether_proven()
        if self._is_draining and not self._is_closing:
            self._answer_early()
        if self.queue.has_answer or self._to_client:
            self.commit_answers(aliases_pool=False)
        if self._is_closing:
            return
        if self._reader.has_stash and self._may_go_on():
            self._read_stashed()
        if self._gate.is_paused and not self._reader.has_stash:
            self._gate.resume(NOT_CONNECTED | OUT_OF_TURN)
        if self._has_ended or self._is_draining or self._upstream_is_gone:
            self._close_if_done()

    def _look_whether_proven(self) -> None:
        sasl = self._reader.sasl
        if self._context.brokers_ask_for_sasl:
            is_known = sasl.is_authenticated or (sasl.is_doubtful and self._broker_decides)
        else:
            is_known = self._reader.has_request
        if is_known:
            self._is_proven = True
            self._admission.prove()

    @property
    def _broker_decides(self) -> bool:
        """Whether the broker has a whole request that it answers only to a client that it has authenticated."""
        awaiting = self.queue.awaiting
        return not self._reader.is_mid_frame and any(slot.api_key not in BEFORE_AUTHENTICATION for slot in awaiting)

    def end(self, cause: str, said: str) -> None:
        self._report.tell(cause, f"closing the connection: {said}")
        self.abort(cause)

    def _read_stashed(self) -> None:
        """Processes stashed requests, up to the first that must wait.

        Requests that the proxy answered itself wait for nothing. The next ones go on in the loop's next turn, so that
        a read of many requests holds up no other connection."""
        try:
            self._reader.read_stashed()
        except Exception as error:
            self.fail("client", error, self._reader.faulty_frame)
            return
        self.commit_answers(aliases_pool=False)
        is_blocked = self.is_full or self._reader.is_blocked
        if self._reader.has_stash and not is_blocked and self._may_go_on() and self._again is None:
            self._again = self._loop.call_soon(self.advance)

    def _close_if_done(self) -> None:
        slots = self.queue.slots
        upstream = self._upstream
        if self._upstream_is_gone:
            if upstream is not None and upstream.has_stash:
                return
            self.queue.fail_own()
            # A request in preparation is the last one, and can no longer be sent.
            if not slots or slots[0].awaits_broker or (self._reader.is_preparing and len(slots) == 1):
                self.close("broker")
        elif (self._has_ended or self._is_draining) and not slots:
            if self._is_draining and not self._reader.is_mid_frame:
                self.close("drained")
            elif self._has_ended and not self._reader.has_stash:
                self.close("client")
        elif self._is_draining and self._timer is None and self.queue.waits_for_long_poll:
            self._timer = self._loop.call_later(self._context.limits.half_close_timeout_ms / 1000, self._end_drain)

    def drain(self) -> None:
        """Takes no more requests, answers those in progress, then closes."""
        if self._is_draining:
            return
        self._is_draining = True
        if not self._reader.is_mid_frame:
            self._gate.pause(DRAINING)
        self.advance()

    def _answer_early(self) -> None:
        """Answers the requests that wait for new records, also one that was not complete when the drain began."""
        streaming = None if self._upstream is None else self._upstream.streaming_slot
        is_any = False
        for slot in self.queue.slots:
            build = self._context.drain_answers.get(slot.api_key)
            if build is not None and slot.answer is None and slot is not streaming:
                slot.abandon()
                slot.answer = build(slot.api_version, slot.correlation_id)
                is_any = True
        if is_any:
            self.commit_answers(aliases_pool=False)
            if self._upstream is not None:
                self._upstream.unblock()

    def _end_drain(self) -> None:
        self._timer = None
        if self.queue.waits_for_long_poll:
            self.close("drained")

    def close(self, cause: str) -> None:
        """Closes when all written bytes have left, at the latest after the close timeout."""
        if self._is_closing:
            return
        self._is_closing = True
        self._close_cause = cause
        if self._transport is not None:
            self._start_timer(self._context.close_timeout_ms, cause)
            self.outlet.close()
        if self._upstream is not None:
            self._upstream.close()

    def close_idle(self, timeout_s: float) -> None:
        """Closes the connection if no byte has moved for so long, and neither the client nor the broker would end it.

        Such a connection has no broker, or the proxy does not read from the client. A broker closes the other idle
        connections itself. A client that does not take its bytes has the send timeout."""
        if self._is_closing or self.is_full or self._loop.time() - self.last_active_s < timeout_s:
            return
        if self._upstream is None:
            said = "it is idle, and has no connection to a broker"
        elif self._gate.is_paused:
            said = "the broker neither reads requests nor answers them"
        else:
            return
        self._report.log(logging.INFO, "idle", f"closing the connection: {said}")
        self.close("idle")

    def _on_timeout(self, cause: str) -> None:
        said = "closing the connection: the client does not take its last bytes, or sends none"
        self._report.log(logging.INFO, cause, said)
        self.abort(cause)

    def abort(self, cause: str) -> None:
        self._is_closing = True
        self._close_cause = cause
        if self._transport is not None:
            self._transport.abort()

    def _start_timer(self, timeout_ms: int, cause: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(timeout_ms / 1000, self._on_timeout, cause)

    def fail(self, peer: Sender, error: Exception, frame: FaultyFrame | None = None) -> None:
        """Logs the error in one line, sends the answers that are complete, then closes both connections.

        `frame` is the one that cannot be decoded, if the error concerns one."""
        if self._is_closing:
            return
        self._report.failed(peer, error, frame)
        self._emit_answers()
        self._flush(aliases_pool=True)
        self.close("protocol_error" if isinstance(error, ProtocolError) else "handler_error")
