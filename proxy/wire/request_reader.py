"""Cuts a client's byte stream into requests, and sends each upstream, unchanged or through the handler of its API.

The reader never holds a request of an API without a handler: its bytes leave as they arrive. The reader stashes
requests that must wait. The stash is never more than one read, because the connection then stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from array import array
from collections.abc import Callable, Coroutine, Sequence

from protocol.api_keys import ApiKey
from protocol.errors import FrameSizeError, ProtocolError, TruncatedError
from protocol.frame import LENGTH_BYTES, REQUEST_HEAD_BYTES, FramePart, FrameTracker, frame_length
from protocol.header import client_id_bounds, parse_request_head
from protocol.primitives import Buffer
from proxy.wire.context import ConnectionContext
from proxy.wire.error_log import FaultyFrame
from proxy.wire.exchange import Answer, Forward, Handler, HeldRequest, PrefixHandler, Prepare, Request
from proxy.wire.memory import DECODED_FACTOR, FLOOR_BYTES, MessageGrant
from proxy.wire.response_queue import ResponseQueue, Slot, SlotOwner
from proxy.wire.sasl_exchange import AUTHENTICATION_APIS, BEFORE_AUTHENTICATION, SaslExchange
from proxy.wire.upstream import UpstreamConnection

_HEAD = struct.Struct(">hhi")
_REQUEST_LIMIT = "limits.socket.request.max.bytes"
_HELD_LIMIT = "the limit of requests that are decoded"
_UNAUTHENTICATED_LIMIT = "the limit before authentication"
MAX_PREFIX_BYTES = 128 * 1024
"""Enough for a client id and a transactional id, at most 32 KiB each, and the fields around them."""


class UnauthenticatedRequestError(ProtocolError):
    """A request before the broker has authenticated the client. A broker closes such a connection too."""


class Stash:
    """Requests that wait: a copy of their bytes, and where each ends. An object for each would be ten times as large.

    `parts` are consecutive, and begin with the start of a request. Only the last request may be incomplete."""

    __slots__ = ("_data", "_ends", "_next", "_remaining", "_start")

    def __init__(self, parts: Sequence[FramePart]) -> None:
        self._data = memoryview(b"".join(part.data for part in parts))
        self._ends = array("I")
        self._next = 0
        self._start = 0
        self._remaining = parts[-1].remaining
        end = 0
        for part in parts:
            end += len(part.data)
            if not part.remaining:
                self._ends.append(end)
        if self._remaining:
            self._ends.append(end)

    def __len__(self) -> int:
        return len(self._ends) - self._next

    @property
    def size_bytes(self) -> int:
        return len(self._data) - self._start

    @property
    def first(self) -> FramePart:
        """The first request, as one part."""
        data = self._data[self._start : self._ends[self._next]]
        remaining = self._remaining if len(self) == 1 else 0
        return FramePart(data, True, remaining, len(data) - LENGTH_BYTES + remaining)

    def drop_first(self) -> None:
        self._start = self._ends[self._next]
        self._next += 1


class RequestReader:
    """Reads one client's requests. It calls `must_wait` before each; if that returns True, it has paused reading."""

    def __init__(
        self,
        context: ConnectionContext,
        owner: SlotOwner,
        queue: ResponseQueue,
        must_wait: Callable[[FramePart], bool],
        prepare: Callable[[Slot, Prepare], None],
    ) -> None:
        self.upstream: UpstreamConnection | None = None
        self.is_mid_frame = False
        """A request has begun, and either its last byte or its handler's decision is missing."""
        self.has_request = False
        """The client's first request has arrived whole."""
        self.client_id: str | None = None
        """The client id of the first request that has one in its first piece, for the log."""
        self.sasl = SaslExchange()
        self.is_preparing = False
        """The last request has its place in the queue, but has not been sent yet."""
        self._context = context
        self._owner = owner
        self._queue = queue
        self._must_wait = must_wait
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._tracker = FrameTracker(REQUEST_HEAD_BYTES, context.limits.max_request_bytes, _REQUEST_LIMIT)
        self._to_broker: list[Buffer] = []
        self._stash: Stash | None = None
        self._collected: bytearray | None = None
        """The beginning of a request that is held until it is whole."""
        self._arriving: MessageGrant | None = None
        """The memory for such a request, if it is large."""
        self._partial: bytearray | None = None
        """A request that is held although its API does not say so, or a prefix that is not long enough yet."""
        self._decidable_from = 0
        """The size at which the prefix is examined again. It doubles, so that a client that sends a byte at a time does
        not make the event loop read the same bytes again and again."""
        self._slot: Slot | None = None
        self._grant: MessageGrant | None = None
        """The memory for the next request in decoded form, if it is large."""
        self._decoded_bytes = 0
        """The size of the next request in decoded form."""
        self._waits_for_memory = False
        self._waits_for_own = False
        self._holder: Handler | None = None
        """The handler of the current request, if the request is held until it is complete."""
        self._begun: memoryview | None = None

    @property
    def faulty_frame(self) -> FaultyFrame | None:
        """The request that was read when an error was raised. None: the length of a frame was wrong, or it is a token.

        A token without a header is secret from its first byte."""
        if self._slot is not None and self._slot.is_raw_token:
            return None
        data = self._collected or self._partial or self._begun
        return None if data is None else FaultyFrame("client", bytes(memoryview(data)[LENGTH_BYTES:]))

    @property
    def has_stash(self) -> bool:
        return self._stash is not None

    @property
    def is_blocked(self) -> bool:
        """Whether the next request waits for the memory of other connections, or for the answers before it."""
        return self._waits_for_memory or (self._waits_for_own and bool(self._queue.slots))

    def pass_on(self, data: memoryview) -> bool:
        """Forwards bytes from the middle of a request that leaves as it arrives. False: these are other bytes.

        Nothing that waits can go on because of them."""
        tracker = self._tracker
        if len(data) >= tracker.remaining or self._stash is not None or self.upstream is None:
            return False
        if self._partial is not None or self._collected is not None:
            return False
        tracker.skip(len(data))
        self.upstream.send((data,), aliases_pool=True)
        return True

    def read(self, data: memoryview) -> None:
        """Processes the bytes of one read. Raises `ProtocolError`, and the exceptions of handlers."""
        self._begun = None
        parts = self._tracker.feed(data)
        if not self.has_request:
            self.has_request = any(not part.remaining for part in parts)
        try:
            for index, received in enumerate(parts):
                part = received if self._collected is None else self._collect(received)
                if part is None:
                    continue
                if part.is_start and self._must_wait(part):
                    self._stash = Stash([part, *parts[index + 1 :]])
                    break
                self._process(part)
        finally:  # the requests before a faulty one leave, also if one read has both
            self._commit(aliases_pool=True)

    def read_stashed(self) -> None:
        """Processes stashed requests, up to the first that must wait."""
        stash = self._stash
        try:
            while stash is not None and not self._must_wait(part := stash.first):
                stash.drop_first()
                if not stash:
                    stash = self._stash = None
                self._process(part)
        finally:
            self._commit(aliases_pool=False)

    def abandon(self) -> None:
        """Drops the requests that wait, and abandons the one that has arrived in part, because the client is gone.

        The connection itself stays in memory until a garbage collection, its bytes must not."""
        if self._slot is not None:
            self._slot.abandon()
            self._slot = None
        for grant in (self._grant, self._arriving):
            if grant is not None:
                grant.release()
        for budget in (self._context.arriving, self._context.requests):
            budget.forget(id(self._owner))
        self._stash = self._collected = self._partial = self._begun = None
        self._to_broker.clear()

    def may_hold(self, part: FramePart, again: Callable[[], None], *, is_full: bool) -> bool:
        """Returns whether there is memory for the request that begins with `part`: for its bytes, and, when it is
        whole, for its decoded form.

        If there is none, `again` is called when there is. A large request is decoded when the connection has nothing
        else in progress. The broker would not begin it earlier either, and the client reads its answers."""
        self._waits_for_memory = self._waits_for_own = False
        self._decoded_bytes = 0
        if part.size < REQUEST_HEAD_BYTES or self.sasl.raw_tokens_left:
            return True
        api_key, _, _ = _HEAD.unpack_from(part.data, LENGTH_BYTES)
        if api_key not in self._context.router.handlers or part.size > self._context.limits.max_held_request_bytes:
            return True
        if part.remaining:
            if part.size > FLOOR_BYTES and self._arriving is None:
                self._arriving = self._context.arriving.admit(id(self._owner), part.size, again)
                self._waits_for_memory = self._arriving is None
            return not self._waits_for_memory
        # A Fetch may wait for records for long, and is decoded only if it touches the remote tier (`count_decoded`).
        size_bytes = part.size * (1 if api_key == ApiKey.FETCH else DECODED_FACTOR)
        in_progress_bytes = sum(slot.decoded_bytes for slot in self._queue.slots)
        if in_progress_bytes + size_bytes > FLOOR_BYTES:
            self._waits_for_own = bool(self._queue.slots) or is_full
            if self._waits_for_own:
                return False
            if size_bytes > FLOOR_BYTES:
                self._grant = self._context.requests.admit(id(self._owner), size_bytes, again)
                self._waits_for_memory = self._grant is None
        self._decoded_bytes = size_bytes
        return not self._waits_for_memory

    def _collect(self, part: FramePart) -> FramePart | None:
        """Takes the next part of a request that is held. Returns the request when it is whole."""
        assert self._collected is not None
        self._collected += part.data
        if part.remaining:
            return None
        whole, self._collected = memoryview(self._collected), None
        return part._replace(data=whole, is_start=True)

    def _process(self, part: FramePart) -> None:
        if part.is_start:
            self._begin(part)
        elif self._partial is not None:
            self._partial += part.data
            self._examine(self._partial, part.remaining)
        else:
            self._to_broker.append(part.data)
        self.is_mid_frame = part.remaining > 0

    def _begin(self, part: FramePart) -> None:
        context = self._context
        if self.sasl.raw_tokens_left:
            self._begun = None
            self._begin_authentication(part, ApiKey.SASL_AUTHENTICATE, 0, 0)
            return
        self._begun = part.data
        if part.size < REQUEST_HEAD_BYTES:
            raise TruncatedError(f"a request of {part.size} bytes, which is too short for its header")
        api_key, api_version, correlation_id = _HEAD.unpack_from(part.data, LENGTH_BYTES)
        if self.client_id is None:
            self._learn_client_id(part)
        if context.brokers_ask_for_sasl and not self.sasl.is_authenticated:
            self._check_unauthenticated(part, api_key)
        if api_key in AUTHENTICATION_APIS:
            self._begin_authentication(part, api_key, api_version, correlation_id)
            return
        holder = context.router.handlers.get(api_key)
        if holder is not None:
            _check_size(part.size, api_key, context.limits.max_held_request_bytes, _HELD_LIMIT)
            if part.remaining:
                self._collected = bytearray(part.data)
                return
            if self._arriving is not None:
                self._arriving.release()
                self._arriving = None
        context.metrics.requests[api_key] += 1
        slot = Slot(self._owner, api_key, api_version, correlation_id, self._loop.time())
        slot.decoded_bytes, slot.grant, self._grant = self._decoded_bytes, self._grant, None
        self._holder = None
        if holder is not None:
            self._await_whole(slot, holder)
        elif api_key not in context.router.prefix_handlers:
            self._queue.push_sent(slot)
            self._to_broker.append(part.data)
            return
        self._slot = slot
        self._examine(part.data, part.remaining)

    def _await_whole(self, slot: Slot, holder: Handler) -> None:
        """Holds the request until it is complete. `holder` then decides about it."""
        self._holder = holder
        slot.request = Request(slot.api_key, slot.api_version, slot.correlation_id, b"", self._context.clock_ms())

    def _learn_client_id(self, part: FramePart) -> None:
        with contextlib.suppress(TruncatedError):
            payload = part.data[LENGTH_BYTES:]
            start, end = client_id_bounds(payload)
            self.client_id = str(payload[start : max(start, end)], "utf-8", "replace")

    def _check_unauthenticated(self, part: FramePart, api_key: int) -> None:
        """Lets only those requests pass that a broker answers before it has authenticated the client."""
        if api_key not in BEFORE_AUTHENTICATION and self.sasl.is_doubtful:
            return
        if api_key not in BEFORE_AUTHENTICATION:
            self._begun = None  # it may be a token of a client that has not waited for the broker's answer
            raise UnauthenticatedRequestError(
                f"a request with API key {api_key} before the client has authenticated: set security.protocol=SASL_SSL "
                "(or SASL_PLAINTEXT) in the client"
            )
        _check_size(part.size, api_key, self._context.limits.max_unauthenticated_request_bytes, _UNAUTHENTICATED_LIMIT)

    def _begin_authentication(self, part: FramePart, api_key: int, api_version: int, correlation_id: int) -> None:
        _check_size(part.size, api_key, self._context.limits.max_unauthenticated_request_bytes, _UNAUTHENTICATED_LIMIT)
        self._context.metrics.requests[api_key] += 1
        self._owner.on_authentication()
        slot = Slot(self._owner, api_key, api_version, correlation_id, self._loop.time())
        slot.is_raw_token = self.sasl.raw_tokens_left > 0
        self._await_whole(slot, self.sasl)
        self._slot = slot
        self._examine(part.data, part.remaining)

    def _examine(self, frame: memoryview | bytearray, remaining: int) -> None:
        """`frame` is the part of the current request that has arrived, with the length prefix."""
        slot = self._slot
        assert slot is not None
        finished = False
        if self._holder is None and (not remaining or len(frame) >= self._decidable_from):
            by_prefix = self._context.router.prefix_handlers[slot.api_key]
            finished = self._decide_by_prefix(by_prefix, slot, frame, remaining)
        if self._holder is not None and not remaining:
            finished = True
            slot.request.frame = bytes(memoryview(frame)[LENGTH_BYTES:])
            self._decide(self._holder, slot)
        if finished:
            self._slot = None
            self._partial = None
            self._decidable_from = 0
        elif self._partial is None:
            self._partial = bytearray(frame)

    def _decide(self, handler: Handler, slot: Slot) -> None:
        action, slot.respond = handler.on_request(slot)
        if isinstance(action, Answer):
            slot.answer = action.payload
            slot.release()
            self._queue.push_answered(slot)
            return
        if isinstance(action, Prepare):
            self._queue.push_preparing(slot)
            self.is_preparing = True
            self._prepare(slot, action)
            return
        slot.hold_bytes = action.hold_bytes
        slot.patcher = action.patcher
        slot.passes = action.passes
        self._enqueue(slot, action.no_response)
        self._send(slot, action)
        if slot.respond is None:
            slot.release()  # the response needs no handler

    def _send(self, slot: Slot, action: Forward) -> None:
        if not slot.is_raw_token:
            slot.upstream_correlation_id = parse_request_head(action.frame).correlation_id
        self._to_broker += (frame_length(action.frame), action.frame)

    def send_prepared(self, slot: Slot, action: Answer | Forward) -> None:
        """Does what a `Prepare` has determined. A frame leaves at once, an answer when the caller commits it."""
        self.is_preparing = False
        if isinstance(action, Answer):
            slot.answer = action.payload
            return
        slot.hold_bytes = action.hold_bytes
        slot.patcher = action.patcher
        slot.passes = action.passes
        self._queue.awaiting.append(slot)
        self._send(slot, action)
        self._commit(aliases_pool=False)

    def _decide_by_prefix(
        self, handler: PrefixHandler, slot: Slot, frame: memoryview | bytearray, remaining: int
    ) -> bool:
        """Returns whether the request's bytes may leave now. False: it needs more bytes, or it is held."""
        try:
            decision = handler.on_prefix(slot, memoryview(frame)[LENGTH_BYTES:])
        except TruncatedError:
            if remaining and len(frame) < MAX_PREFIX_BYTES:
                self._decidable_from = min(2 * len(frame), MAX_PREFIX_BYTES)
                return False
            raise
        if isinstance(decision, HeldRequest):
            size = len(frame) - LENGTH_BYTES + remaining
            _check_size(size, slot.api_key, MAX_PREFIX_BYTES, "the limit of requests that are held after their head")
            self._await_whole(slot, decision.handler)
            return False
        action, slot.respond = decision
        slot.hold_bytes = action.hold_bytes
        slot.passes = action.passes
        self._enqueue(slot, action.no_response)
        self._to_broker.append(frame)
        return True

    def _enqueue(self, slot: Slot, no_response: bool) -> None:
        if no_response:
            self._queue.last_sent = slot
        else:
            self._queue.push_sent(slot)

    def _commit(self, *, aliases_pool: bool) -> None:
        if self._to_broker and self.upstream is not None:
            buffers, self._to_broker = self._to_broker, []
            self.upstream.send(buffers, aliases_pool=aliases_pool)

    def try_forward(self, slot: Slot, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        """Implements `Exchange.try_forward`. The frame leaves at once."""
        is_held = any(each is not None for each in (self._partial, self._collected, self._stash))
        if self.upstream is None or self._queue.last_sent is not slot or (self.is_mid_frame and not is_held):
            return None
        head = parse_request_head(frame)
        ours = Slot(self._owner, head.api_key, head.api_version, head.correlation_id, self._loop.time())
        ours.hold_bytes = None
        ours.future = self._loop.create_future()
        self._queue.awaiting.append(ours)
        self._to_broker += (frame_length(frame), frame)
        self._commit(aliases_pool=False)
        return _result_of(ours.future)


def _check_size(size_bytes: int, api_key: int, limit: int, setting: str) -> None:
    if size_bytes > limit:
        raise FrameSizeError(f"a request of {size_bytes} bytes with API key {api_key}, above {setting}")


async def _result_of(future: asyncio.Future[memoryview]) -> memoryview:
    return await future
