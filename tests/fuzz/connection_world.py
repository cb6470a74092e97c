"""Clients and brokers of a proxy, in virtual time, who keep the protocol or break it as a test says.

Each client knows the answers that it must get: to each whole and valid request, in order. It is excused from that when
it has broken the protocol or left, or when its broker has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.apis.api_versions import unsupported_version_response
from protocol.apis.coordinated_ids import refusal
from protocol.errors import ErrorCode
from protocol.header import build_request_header, build_response_header, parse_request_head
from protocol.primitives import INT16, INT32
from proxy.handlers.addresses import AddressHandler
from proxy.handlers.api_versions import ApiVersionsHandler
from proxy.handlers.fetch.pass_through import PassThroughFetchHandler
from proxy.handlers.guards import own_ids_guards
from proxy.handlers.produce import ProduceHandler
from proxy.wire.context import Router
from proxy.wire.exchange import Buffers, Exchange, Forward, Prepare, Respond
from proxy.wire.memory import HoldBudget
from tests.support.fakes.broker.wire import frame
from tests.support.fakes.frame_decoder import FrameDecoder
from tests.support.fakes.message_encoder import smallest
from tests.support.proxy.virtual_network import Peer

OWN_GROUP = "own"
OPAQUE = ApiKey.DESCRIBE_GROUPS
HELD, SLOW, PREPARED, ASKING = ApiKey.DESCRIBE_ACLS, ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS, ApiKey.ELECT_LEADERS
"""APIs that the proxy passes on. Here they have handlers that hold, wait, prepare, and ask the broker once more."""
KINDS = 13
"""The kinds of requests, numbered as in `request_of`."""
LARGE = 64 * 1024
_ASK_S = 5.0
_PATTERN = bytes(range(251))


@dataclass(slots=True)
class _State:
    exchange: Exchange
    delay_s: float
    asks: bool

    def respond(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        return self._later(response) if self.delay_s else (bytes(response),)

    async def _later(self, response: memoryview) -> Buffers:
        await asyncio.sleep(self.delay_s)
        asked = self.exchange.try_forward(build_request_header(OPAQUE, 0, 99, "own")) if self.asks else None
        if asked is not None:
            with contextlib.suppress(TimeoutError):  # as every handler, it has a deadline
                async with asyncio.timeout(_ASK_S):
                    await asked
        return (bytes(response),)


@dataclass(slots=True)
class ScriptedApi:
    """Implements `Handler`. Every request holds memory of the budget until its answer has left."""

    budget: HoldBudget
    delay_s: float = 0.0
    prepares: bool = False
    asks: bool = False

    def on_request(self, exchange: Exchange) -> tuple[Forward | Prepare, Respond]:
        exchange.on_sent = self.budget.grant(exchange.connection_id, 1000).release
        state = _State(exchange, 0.0 if self.prepares else self.delay_s, self.asks)
        if not self.prepares:
            return Forward(exchange.request.frame, hold_bytes=None), state.respond

        async def forward() -> Forward:
            await asyncio.sleep(self.delay_s)
            return Forward(exchange.request.frame, hold_bytes=None)

        return Prepare(forward), state.respond


def router(budget: HoldBudget) -> Router:
    guards, prefix_guards = own_ids_guards(OWN_GROUP)
    return Router(
        {
            **guards,
            ApiKey.METADATA: AddressHandler(),
            ApiKey.API_VERSIONS: ApiVersionsHandler(),
            ApiKey.FETCH: PassThroughFetchHandler(),
            HELD: ScriptedApi(budget),
            SLOW: ScriptedApi(budget, delay_s=0.7),
            PREPARED: ScriptedApi(budget, delay_s=0.3, prepares=True),
            ASKING: ScriptedApi(budget, delay_s=0.2, asks=True),
        },
        {**prefix_guards, ApiKey.PRODUCE: ProduceHandler()},
    )


def body_of(correlation_id: int, size_bytes: int) -> bytes:
    """Returns bytes that differ from those of the other answers."""
    first = correlation_id * 7 % len(_PATTERN)
    return (_PATTERN * (size_bytes // len(_PATTERN) + 2))[first : first + size_bytes]


def request_of(kind: int, correlation_id: int, size_bytes: int) -> tuple[bytes, bytes | None]:
    """Returns a request, and the answer that the client must get. None: the request has no answer."""

    def made(key: int, version: int, body: bytes) -> bytes:
        return build_request_header(key, version, correlation_id, "client") + body

    def answered(request: bytes) -> tuple[bytes, bytes | None]:
        return request, answer_of(request)

    body = body_of(correlation_id, size_bytes)
    acks = {4: b"\xff\xff", 5: b"\0\0"}
    match kind % KINDS:
        case 0:
            return answered(made(OPAQUE, 0, body))
        case 1:
            return answered(made(ApiKey.METADATA, 9, smallest("MetadataRequest", 9)))
        case 2:
            return answered(made(ApiKey.API_VERSIONS, 2, b""))
        case 3:
            return made(ApiKey.API_VERSIONS, 99, b""), unsupported_version_response(correlation_id)
        case 4 | 5 as number:
            return answered(made(ApiKey.PRODUCE, 3, b"\xff\xff" + acks[number] + bytes(8) + body))
        case 6:
            return answered(made(HELD, 1, body[:4000]))
        case 7:
            return answered(made(SLOW, 1, b""))
        case 8:
            return answered(made(PREPARED, 1, b""))
        case 9:
            return answered(made(ASKING, 0, b""))
        case 10:
            refused = made(ApiKey.HEARTBEAT, 1, smallest("HeartbeatRequest", 1, GroupId=OWN_GROUP))
            return refused, refusal(refused, ErrorCode.GROUP_AUTHORIZATION_FAILED)
        case 11:
            return answered(
                made(ApiKey.JOIN_GROUP, 5, smallest("JoinGroupRequest", 5, GroupId="m" * (size_bytes % 999)))
            )
        case _:
            return answered(made(ApiKey.FETCH, 16, smallest("FetchRequest", 16)))


def is_answered_by_the_proxy(kind: int) -> bool:
    return kind % KINDS in (3, 10)


def answer_of(request: bytes) -> bytes | None:
    """Returns the broker's answer. Some answers are large. None: the request has no answer."""
    key, version, correlation_id = parse_request_head(request)
    header = build_response_header(key, version, correlation_id)
    size_bytes = LARGE + correlation_id if correlation_id % 16 == 7 else correlation_id * 11 % 400
    match key, version:
        case ApiKey.PRODUCE, 3:
            is_silent = request[len(build_request_header(key, version, 0, "client")) :][2:4] == b"\0\0"
            return None if is_silent else header + body_of(correlation_id, size_bytes)
        case ApiKey.METADATA, 9:
            return header + smallest("MetadataResponse", version)
        case ApiKey.API_VERSIONS, 2:
            return header + smallest("ApiVersionsResponse", version)
        case ApiKey.FETCH, 16:
            partition: dict[str, Any] = {
                "PartitionIndex": 0,
                "ErrorCode": 0,
                "HighWatermark": 9,
                "LastStableOffset": 9,
                "LogStartOffset": 0,
                "AbortedTransactions": None,
                "PreferredReadReplica": -1,
                "Records": body_of(correlation_id, size_bytes),
            }
            topics = [{"TopicId": UUID(int=1), "Partitions": [partition]}]
            return header + smallest("FetchResponse", version, Responses=topics)
    return header + body_of(correlation_id, size_bytes)


@dataclass(slots=True)
class Client:
    peer: Peer
    expected: deque[bytes] = field(default_factory=deque)
    unsent: bytearray = field(default_factory=bytearray)
    """The rest of a request that was sent in part."""
    is_excused: bool = False
    is_unchecked: bool = False
    """Whether its answers may be anything, since somebody sent random bytes."""
    has_left: bool = False
    correlation_id: int = 0
    _decoder: FrameDecoder = field(default_factory=FrameDecoder)

    def __post_init__(self) -> None:
        self.peer.on_received = self.check

    def send(self, kind: int, size_bytes: int, sent_bytes: int | None = None) -> None:
        """Sends a request, or only its first bytes. The rest of an earlier request leaves first."""
        self.flush()
        self.correlation_id += 1
        request, answer = request_of(kind, self.correlation_id, size_bytes)
        if answer is not None:
            self.expected.append(answer)
        self.unsent += frame(request)
        self.flush(sent_bytes)

    def flush(self, size_bytes: int | None = None) -> None:
        sent = bytes(self.unsent[:size_bytes])
        del self.unsent[: len(sent)]
        self.peer.send(sent)

    def check(self) -> None:
        """Compares the answers that have arrived with the expected ones."""
        received = bytes(self.peer.received)
        self.peer.received.clear()
        if self.is_unchecked:
            return
        for payload in self._decoder.feed(received):
            assert self.expected, "an answer to no request"
            assert payload == self.expected.popleft(), "another answer than that of the request"


@dataclass(slots=True)
class Broker:
    peer: Peer
    client: Client
    asked: deque[bytes] = field(default_factory=deque)
    unsent: bytearray = field(default_factory=bytearray)
    """The rest of an answer that was sent in part."""
    answers_at_once: bool = False
    _decoder: FrameDecoder = field(default_factory=FrameDecoder)

    def __post_init__(self) -> None:
        self.peer.on_received = self.take

    def take(self) -> None:
        received = bytes(self.peer.received)
        self.peer.received.clear()
        if self.client.is_unchecked:
            return
        for request in self._decoder.feed(received):
            if answer_of(request) is not None:
                self.asked.append(request)
        if self.answers_at_once:
            self.answer_all()

    def answer(self, sent_bytes: int | None = None) -> None:
        """Sends the next answer, or only its first bytes. The rest of an earlier answer leaves first."""
        self.flush()
        if self.asked:
            self.unsent += frame(answer_of(self.asked.popleft()) or b"")
            self.flush(sent_bytes)

    def answer_all(self) -> None:
        while self.asked:
            self.answer()

    def flush(self, size_bytes: int | None = None) -> None:
        sent = bytes(self.unsent[:size_bytes])
        del self.unsent[: len(sent)]
        self.peer.send(sent)


MALFORMED = (
    INT32.pack(-1),
    INT32.pack(1 << 30),
    INT32.pack(3) + b"abc",
    INT32.pack(10) + INT16.pack(ApiKey.PRODUCE) + INT16.pack(3) + INT32.pack(9) + b"\xff\xff",
    INT32.pack(14) + INT16.pack(ApiKey.JOIN_GROUP) + INT16.pack(77) + INT32.pack(9) + b"\xff\xff\0\1ab",
    INT32.pack(1 << 22) + INT16.pack(HELD) + INT16.pack(0) + INT32.pack(9) + bytes(100),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
"""What a client sends that closes its connection."""

STRAY_ANSWER = INT32.pack(1 << 30) + b"no request has this correlation id"
"""What a broker sends that closes the connection. The client must not see it."""
