"""Handles Fetch: forwards every request, then serves from the remote tier what the broker trimmed.

See docs/design.md, "Fetch".

* A connection that never touched the remote tier is nearly opaque: the proxy only walks the responses. It holds small
  responses and patches them fully. It streams large responses and patches them without a change of length.
* If a request names a partition that is predicted to be remote, or was just seen to be remote, the proxy holds the
  response, whatever its size. The request goes upstream without a session, with MaxWait 0 and with a MaxBytes that
  memory allows. Its remote reads begin at once.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.api_keys import ApiKey, check_version
from protocol.apis.fetch.encoding import encode_response
from protocol.apis.fetch.request import (
    FINAL_SESSION_EPOCH,
    FetchRequest,
    is_replica,
    parse_fetch_request,
    patch_fetch_request,
)
from protocol.apis.fetch.response import FetchResponse, out_of_range, parse_fetch_response
from protocol.apis.fetch.scan import plain_topics
from protocol.apis.fetch.stream import StreamingFetchPatcher
from protocol.errors import ErrorCode
from protocol.header import request_body_position, response_body_position
from protocol.primitives import read_int32
from protocol.steps import Steps, Walk
from proxy.handlers.base import HandlerTools, client_id_of
from proxy.handlers.fetch.completion import FetchCompleter, RemoteReadCounts
from proxy.handlers.fetch.delayed import Completion, DelayedRemoteFetchPurgatory, RemotePartitionRead
from proxy.handlers.fetch.held import FetchConnectionState, FetchConnectionStates, HeldFetch, PartitionKey
from proxy.handlers.fetch.local import LocalAnswers, StreamedPartitions
from proxy.handlers.fetch.merge import split_max_bytes
from proxy.handlers.fetch.trace import begin_trace
from proxy.handlers.fetch.verdict import FetchJudge
from proxy.handlers.turns import SLICE_STEPS, STEPS_OF_A_LOOK_UP, Decision, decide_in_turns, go_on, in_turns
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Respond
from proxy.wire.memory import Grant, HoldBudget
from tiers.metric_spec import CounterSpec, GaugeSpec
from tiers.model.ids import TopicIdPartition

_READ_CAP_MS = 10_000
"""The longest remote read, unless the client's own MaxWait is longer."""
_ANSWER_CAP_MS = 500
"""How long an answer may wait for the remote tier, unless the client's own MaxWait is longer.

A broker with a tier of its own waits as long by default (docs/semantics.md 3.6)."""

_REPLICA_STATE_FROM = 15
_REPLICA_STATE_BYTES = 13
_REPLICA_STATE_HEAD = bytes((1, _REPLICA_STATE_BYTES))
"""The tag and size of the ReplicaState field. It is the last field of the frame, and only followers send it."""


_PREFIX = "tidegate_remote_fetch"

FETCH_REQUESTS = CounterSpec(
    f"{_PREFIX}_requests", "Reads of the remote tier, one per partition of a Fetch.", kafka="RemoteFetchRequestsPerSec"
)
FETCH_BYTES = CounterSpec(
    f"{_PREFIX}_bytes", "Bytes of remote records in answers to clients.", kafka="RemoteFetchBytesPerSec"
)
FETCH_ERRORS = CounterSpec(
    f"{_PREFIX}_errors", "Reads of the remote tier that failed.", kafka="RemoteFetchErrorsPerSec"
)
PENDING = GaugeSpec(f"{_PREFIX}_pending", "Fetches that wait for the remote tier now.")
COMPLETED = CounterSpec(
    f"{_PREFIX}_completed",
    "Fetches that have waited for the remote tier, by their end: satisfied, expired or cancelled.",
    ("completion",),
    kafka="DelayedRemoteFetchMetrics ExpiresPerSec (expired)",
)
HELD_BYTES = GaugeSpec(f"{_PREFIX}_held_bytes", "Bytes reserved for held answers.")
IN_NEITHER_TIER = CounterSpec(
    f"{_PREFIX}_in_neither_tier",
    "Fetched offsets above the log start that are in no tier and in no recorded gap.",
)


class FetchHandler:
    """Implements `Handler`. The handler owns `purgatory`; other code may only read its counters."""

    def __init__(self, tools: HandlerTools) -> None:
        self._tools = tools
        self._connections = FetchConnectionStates()
        self._local = LocalAnswers(tools)
        self._judge = FetchJudge(tools, self._local)
        self._hold_budget = HoldBudget(tools.settings.limits.max_decoded_bytes)
        self.purgatory = DelayedRemoteFetchPurgatory()
        self._completer = FetchCompleter(tools, self._judge, self._local, self._connections, self.purgatory)

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        frame, version = request.frame, request.api_version
        check_version(ApiKey.FETCH, version)
        body_position = request_body_position(request.api_key, version, frame)
        if version < _REPLICA_STATE_FROM and is_replica(read_int32(frame, body_position)[0]):
            return Forward(frame), None
        if version >= _REPLICA_STATE_FROM and _is_from_follower(frame):
            return Forward(frame), None
        connection = self._connections.find(exchange.connection_id)
        if connection is None:
            return self._pass(exchange, body_position)
        return decide_in_turns(self._decided(exchange, connection, body_position))

    def _decided(self, exchange: Exchange, connection: FetchConnectionState, body_position: int) -> Steps[Decision]:
        request = exchange.request
        parsed = yield from parse_fetch_request.steps(request.frame, body_position, request.api_version)
        if parsed.is_from_follower:
            return Forward(request.frame), None
        foreseen = yield from self._foreseen(connection, parsed)
        remembered = yield from self._on_remembered(exchange, connection, parsed, foreseen)
        if remembered is not None:
            return remembered
        return self._pass(exchange, parsed.body_position)

    def _pass(self, exchange: Exchange, body_position: int) -> Decision:
        """Forwards a request that needs nothing special."""
        exchange.tier = "local"
        version = exchange.request.api_version

        def patcher() -> StreamingFetchPatcher:
            patches = StreamedPartitions(self._tools, self._local, partial(self.connection, exchange.connection_id))
            return StreamingFetchPatcher(version, patches, hide_node_endpoints=True)

        def passes(response: memoryview) -> bool:
            topics = plain_topics(response, response_body_position(ApiKey.FETCH, version, response), version)
            for topic in topics or ():
                self._tools.topology.use_topic(topic)
            return topics is not None and not any(map(self._local.is_tiered, topics))

        hold_bytes = self._tools.settings.hold_bytes
        respond = partial(self._relay_or_complete, exchange, body_position)
        return Forward(exchange.request.frame, hold_bytes, patcher, passes), respond

    @property
    def remote_reads(self) -> RemoteReadCounts:
        return self._completer.counts

    @property
    def in_neither_tier_count(self) -> int:
        """The number of requests for an offset that is probably lost. An increase should raise an alarm."""
        return self._judge.in_neither_tier_count

    @property
    def held_bytes(self) -> int:
        """The memory that is reserved for held responses in progress."""
        return self._hold_budget.reserved_bytes

    def connection(self, connection_id: int) -> FetchConnectionState:
        return self._connections.get(connection_id)

    def _on_remembered(
        self, exchange: Exchange, connection: FetchConnectionState, parsed: FetchRequest, foreseen: _Foreseen
    ) -> Steps[Decision | None]:
        """Handles a request on a connection that touched the remote tier. None: the request needs nothing special."""
        request = exchange.request
        exchange.tier = "local"
        if connection.drops_session:
            connection.drops_session = False
            if not parsed.is_full:
                connection.orphaned_session_id = parsed.session_id
                payload = encode_response(
                    parsed.version, request.correlation_id, (), error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND
                )
                return Answer(payload), None
        if not foreseen.remote and not foreseen.is_just_seen:
            if connection.orphaned_session_id and parsed.is_full and parsed.session_id == 0:
                frame = bytearray(request.frame)
                patch_fetch_request(
                    frame, parsed.body_position, parsed.version, session_id=connection.orphaned_session_id
                )
                request.frame = bytes(frame)
                connection.orphaned_session_id = 0
            return None
        connection.just_seen.clear()
        return (yield from self._hold(exchange, connection, parsed, foreseen))

    def _foreseen(self, connection: FetchConnectionState, parsed: FetchRequest) -> Steps[_Foreseen]:
        """Returns what is known about the partitions."""
        found = _Foreseen()
        if not (connection.authorized_topics or connection.just_seen):
            return found
        for index, asked in enumerate(parsed.partitions):
            yield
            key = (asked.topic, asked.partition)
            found.is_just_seen = found.is_just_seen or key in connection.just_seen
            if key in connection.reads:
                found.reads.add(key)
            if asked.topic not in connection.authorized_topics:
                continue
            partition = self._local.known_partition(asked.topic, asked.partition)
            if partition is None:
                continue
            log_start = self._tools.bounds.expected_log_start(partition)
            if log_start is not None and asked.fetch_offset < log_start:
                found.remote[key] = index
        return found

    def _hold(
        self, exchange: Exchange, connection: FetchConnectionState, parsed: FetchRequest, foreseen: _Foreseen
    ) -> Steps[Decision]:
        request = exchange.request
        # The memory of these reads becomes part of the new grant.
        kept = connection.take_over(foreseen.reads)
        grant = self._reserve(exchange, parsed)
        held = self._held(exchange, parsed, grant, is_sessionless=True)
        try:
            predicted = foreseen.remote.values() if grant.max_bytes else ()
            reserved_bytes = yield from self._start_reads(held, predicted, kept)
        except BaseException:  # the client has left
            for read in (*held.reads.values(), *kept.values()):
                read.cancel()
            raise
        frame = bytearray(request.frame)
        session_id = parsed.session_id or connection.orphaned_session_id
        connection.orphaned_session_id = 0
        patch_fetch_request(
            frame,
            parsed.body_position,
            parsed.version,
            max_wait_ms=0,
            max_bytes=max(1, grant.max_bytes - reserved_bytes),
            session_id=session_id,
            session_epoch=FINAL_SESSION_EPOCH,
        )

        def abandon() -> None:
            for read in held.reads.values():
                read.cancel()

        exchange.on_abandoned = abandon
        return Forward(bytes(frame), hold_bytes=None), partial(self._complete_held, held)

    async def _complete_held(self, held: HeldFetch, response: memoryview) -> Buffers:
        return await self._completer.complete(held, await in_turns(_parsed(held.request.version, response)))

    def _start_reads(
        self, held: HeldFetch, predicted: Iterable[int], kept: dict[PartitionKey, RemotePartitionRead]
    ) -> Steps[int]:
        """Starts the reads of the partitions that are predicted to be remote, or goes on with reads in `kept`.

        Returns the bytes that are reserved for them."""
        tools, partitions, reads = self._tools, held.request.partitions, held.reads
        reserved_bytes = 0
        readable: dict[int, tuple[TopicIdPartition, int]] = {}
        for index in predicted:
            yield from STEPS_OF_A_LOOK_UP
            asked = partitions[index]
            partition = self._local.known_partition(asked.topic, asked.partition)
            position = None if partition is None else tools.log.remote_position(partition, asked.fetch_offset)
            if partition is None or position is None or tools.log.is_reading_paused(partition):
                continue
            readable[index] = partition, position
        for index, budget in split_max_bytes(partitions, readable, held.grant.max_bytes).items():
            asked, (partition, position) = partitions[index], readable[index]
            key = (asked.topic, asked.partition)
            if key in reads:
                continue
            yield from STEPS_OF_A_LOOK_UP
            reserved_bytes += budget.max_bytes
            wanted = held.read_request(partition, position, budget)
            left = kept.pop(key, None)
            # If the own read would end with the answer, the read in progress may end before it.
            may_wait = held.deadline_ms > held.answer_at_ms
            if left is not None and left.serves(wanted) and (left.is_done or may_wait):
                reads[key] = left
                continue
            reads[key] = RemotePartitionRead(tools.waiting, tools.spawn, wanted)
            if left is not None:
                left.cancel()  # the new read shares its downloads by now
        for left in kept.values():
            left.cancel()
        return reserved_bytes

    def _reserve(self, exchange: Exchange, parsed: FetchRequest) -> Grant:
        """Reserves memory for the answer of both tiers: the requested bytes, up to a broker's limit and the budget."""
        asked_bytes = sum(max(0, asked.partition_max_bytes) for asked in parsed.partitions)
        wanted_bytes = min(parsed.max_bytes, self._tools.settings.fetch_max_bytes, asked_bytes)
        grant = self._hold_budget.grant(exchange.connection_id, wanted_bytes)
        exchange.on_sent = grant.release
        return grant

    def _relay_or_complete(
        self, exchange: Exchange, body_position: int, response: memoryview
    ) -> Buffers | Coroutine[None, None, Buffers]:
        """Handles a held response to a request without predicted partitions."""
        walk = Walk(self._relayed(exchange, response))
        if walk.go_on(SLICE_STEPS) and walk.result[1] is not None:
            return walk.result[1]
        return self._complete(exchange, body_position, walk)

    def _relayed(self, exchange: Exchange, response: memoryview) -> Steps[tuple[FetchResponse, Buffers | None]]:
        """Returns the response for the client. None: the broker refused a partition, which may be remote."""
        walked = yield from _parsed(exchange.request.api_version, response)
        if out_of_range(walked):
            return walked, None
        return walked, (yield from self._local.relay(walked, exchange.address_of))

    async def _complete(
        self, exchange: Exchange, body_position: int, walk: Walk[tuple[FetchResponse, Buffers | None]]
    ) -> Buffers:
        walked, relayed = await go_on(walk)
        if relayed is not None:
            return relayed
        frame = exchange.request.frame
        parsed = await in_turns(parse_fetch_request.steps(frame, body_position, walked.version))
        held = self._held(exchange, parsed, self._reserve(exchange, parsed), is_sessionless=False)
        return await self._completer.complete(held, walked)

    def _held(self, exchange: Exchange, parsed: FetchRequest, grant: Grant, *, is_sessionless: bool) -> HeldFetch:
        exchange.count_decoded()
        received_at_ms = exchange.request.received_at_ms
        client_id = client_id_of(exchange.request)
        tracer = self._tools.tracer
        trace = None if tracer is None else begin_trace(tracer, exchange, parsed, client_id, self._tools.clock_ms())
        if trace is not None:
            exchange.on_sent = trace.ends_after(grant.release)
        read_ms = min(self._tools.settings.remote_log.fetch_max_wait_ms, _READ_CAP_MS)
        return HeldFetch(
            exchange,
            parsed,
            received_at_ms + max(parsed.max_wait_ms, read_ms),
            received_at_ms + max(parsed.max_wait_ms, min(read_ms, _ANSWER_CAP_MS)),
            client_id,
            grant,
            {},
            is_sessionless,
            trace,
        )


def _parsed(version: int, response: memoryview) -> Steps[FetchResponse]:
    return parse_fetch_response.steps(response, response_body_position(ApiKey.FETCH, version, response), version)


def _is_from_follower(frame: bytes) -> bool:
    """Whether the end of the request is that of a follower's, whose id is below 2^24.

    In place of the id, a consumer may have a rack of 12 characters. The first of them is no zero byte."""
    head_at = -len(_REPLICA_STATE_HEAD) - _REPLICA_STATE_BYTES
    return frame[head_at : 1 - _REPLICA_STATE_BYTES] == _REPLICA_STATE_HEAD + b"\0"


@dataclass(slots=True)
class _Foreseen:
    """What the proxy knows about a request's partitions before the broker answers."""

    remote: dict[PartitionKey, int] = field(default_factory=dict)
    """The indexes of the partitions that the broker will probably answer OFFSET_OUT_OF_RANGE. If the request names a
    partition twice, the last entry counts, as for the broker."""
    reads: set[PartitionKey] = field(default_factory=set)
    """The partitions of which a read of an earlier request goes on."""
    is_just_seen: bool = False
    """Whether a streamed response could not serve one of the partitions just now."""


class RemoteFetchMetrics(Collector):
    def __init__(self, handler: FetchHandler) -> None:
        self._handler = handler

    def collect(self) -> Iterator[Metric]:
        purgatory, reads = self._handler.purgatory, self._handler.remote_reads
        yield FETCH_REQUESTS.family(reads.requests)
        yield FETCH_BYTES.family(reads.size_bytes)
        yield FETCH_ERRORS.family(reads.errors)
        yield PENDING.family(purgatory.pending_count)
        completed = COMPLETED.family()
        for completion in Completion:
            completed.add_metric([completion.value], purgatory.completed[completion])
        yield completed
        yield HELD_BYTES.family(self._handler.held_bytes)
        yield IN_NEITHER_TIER.family(self._handler.in_neither_tier_count)
