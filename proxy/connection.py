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
from collections.abc import Callable, Coroutine
from typing import cast

from protocol.api_keys import ApiKey
from protocol.errors import ProtocolError
from protocol.frame import frame_length
from protocol.primitives import Buffer
from proxy.admission import Admission, address_of
from proxy.connection_failure import log_failure
from proxy.context import ConnectionContext, ConnectionRegistry, Endpoint
from proxy.exchange import Buffers, Prepare
from proxy.flow_control import DRAINING, NOT_CONNECTED, OUT_OF_TURN, PEER_IS_FULL, Outlet, ReadGate
from proxy.request_reader import RequestReader
from proxy.response_queue import ResponseQueue, Slot
from proxy.upstream import UpstreamConnection, UpstreamUnavailableError, connect_upstream

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
        """`admission` None: it is asked for when the connection is made."""
        self.connection_id = next(_connection_ids)
        self.queue = ResponseQueue(context.limits.max_in_flight)
        self.last_active_s = 0.0
        self.relays_blindly = False
        self.is_full = False
        """The client does not read what was written: no response begins, so that none is made for nobody."""
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
                logger.warning("connection refused: %s is reached", admitted, extra=self._who())
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
            self.fail("client", error)

    def eof_received(self) -> bool:
        self._has_ended = True
        self._advance()
        if self._transport is not None and self._transport.get_extra_info("ssl_object") is not None:
            return False  # TLS as asyncio has it knows no half-closed connection
        if not self._is_closing:
            self._start_timer(self._context.limits.half_close_timeout_ms, "half_closed")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._outlet.on_lost()
        self._flush(aliases_pool=False)
        if self._timer is not None:
            self._timer.cancel()
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
        if self._upstream is not None:
            self._upstream.gate.pause(PEER_IS_FULL)

    def resume_writing(self) -> None:
        if not self._outlet.on_drained():
            return
        self.is_full = False
        if self._upstream is not None:
            self._upstream.unblock()
            if not self.is_full:
                self._upstream.gate.resume(PEER_IS_FULL)

    def _must_wait(self) -> bool:
        """Whether the next request has to; what it waits for ends the pause."""
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
        """The broker takes no more bytes for now."""
        self._gate.pause(PEER_IS_FULL)

    def resume_requests(self) -> None:
        self._gate.resume(PEER_IS_FULL)

    def unblock(self) -> None:
        """Goes on with stashed requests, as far as they may go now."""
        if self._is_closing:
            return
        try:
            if self.relays_blindly:
                if (raw := self._reader.take_stash()) and self._upstream is not None:
                    self._upstream.send(raw, aliases_pool=False)
            else:
                self._reader.read_stashed()
        except Exception as error:
            self.fail("client", error)
            return
        if not self._reader.has_stash:
            self._gate.resume(NOT_CONNECTED)
            self._gate.resume(OUT_OF_TURN)
        self._advance()

    def on_authentication(self) -> None:
        self.connection_id = next(_connection_ids)

    def _begin_raw_tokens(self, count: int | None) -> None:
        """After SaslHandshake v0 both sides speak raw tokens (semantics 1.4): `count` frames of the client, and the
        broker's answers to them. None: nobody knows how many, and nothing can be told apart any more."""
        self._reader.awaits_raw_tokens = False
        if count is not None:
            self._reader.raw_tokens = count
            return
        logger.warning("SaslHandshake v0: relaying blindly, broker addresses are not rewritten", extra=self._who())
        self.relays_blindly = True

    def on_upstream_gone(self) -> None:
        self._upstream_is_gone = True
        self._advance()

    def emit(self, buffers: Buffers) -> None:
        """Bytes of the response whose turn it is; they leave with the next `commit_answers`."""
        self._to_client += buffers

    def on_streamed(self, slot: Slot) -> None:
        """The last byte of the head slot's response was emitted."""
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
        """The head slot's response is complete and has not been emitted."""
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
            # Not ours unless the connection ends or drains: something that the handler awaited was cancelled.
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
        """Bytes of a blind relay."""
        self._outlet.write([data], aliases_pool=True)

    def _observe(self, slot: Slot) -> None:
        self._context.metrics.observe(slot.api_key, slot.tier, self._loop.time() - slot.started_s)

    def advance(self) -> None:
        """After responses have been taken: requests that waited for room go on, and an end that is due comes."""
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
        """Takes no more requests, answers what is under way, then closes."""
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

    def fail(self, peer: str, error: Exception) -> None:
        """One line that says what is wrong, then what is answered already, then the end of both connections."""
        if self._is_closing:
            return
        log_failure(logger, peer, error, self._who())
        self.commit_answers(aliases_pool=True)
        self.close("protocol_error" if isinstance(error, ProtocolError) else "handler_error")

    def _who(self) -> dict[str, object]:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return {
            "connection_id": self.connection_id,
            "node_id": self.node_id,
            "client": f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else None,
        }
