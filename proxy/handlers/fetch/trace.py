"""`FetchTrace`: the trace of one Fetch that needs the remote tier. A Fetch that the broker answers alone has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, get_current_span

from protocol.apis.fetch.request import FetchRequest
from protocol.apis.fetch.response import FetchResponse, out_of_range
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from proxy.handlers.fetch.delayed import RemotePartitionRead
from proxy.handlers.fetch.merge import RemoteOutcome
from proxy.wire.exchange import Exchange
from tiers.tracing import fail, traceparent, within, within_named

_NS_PER_MS: Final = 1_000_000
ABANDONED: Final = "abandoned"
"""The error of a work that ended without its result: the client or the broker disconnected, or the proxy drains.

A proxy that drains answers the client without the two tiers (`proxy/handlers/drain_answers.py`)."""


class FetchTrace:
    """The spans of the client's request and of its parts. The broker's part begins when the request arrived."""

    def __init__(self, tracer: Tracer, span: Span, exchange: Exchange, began_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._within = within(span)
        self.name = traceparent(span)
        """Names the client's request for its reads."""
        node = {} if exchange.node_id is None else {"tidegate.kafka.node_id": exchange.node_id}
        self._broker = tracer.start_span(
            "forward Fetch", self._within, SpanKind.CLIENT, {"messaging.system": "kafka", **node}, start_time=began_ns
        )
        self._refused_count: int | None = None
        """None: the broker has not answered yet."""
        self._is_answered = False

    def on_broker_answer(self, response: FetchResponse) -> None:
        self._refused_count = len(out_of_range(response))
        local_bytes = sum(entry.records_bytes for entry in response.partitions)
        self._broker.set_attributes(
            {"tidegate.fetch.out_of_range_partitions": self._refused_count, "tidegate.answer.local_bytes": local_bytes}
        )
        _fail_with(self._broker, {response.error_code})
        self._broker.end()

    def judging(self) -> Span | None:
        """Begins the span of the judgements. None: the broker refused no partition."""
        count = self._refused_count
        return self._part("judge", {"tidegate.fetch.partitions": count}) if count else None

    def waiting(self, reads: Collection[RemotePartitionRead]) -> Span:
        """Begins the span of the wait. A read that was too slow for a former request is in that one's trace."""
        span = self._part("purgatory", {"tidegate.fetch.remote_reads": len(reads)})
        for name in {read.request.trace for read in reads} - {self.name, ""}:
            span.add_link(get_current_span(within_named(name)).get_span_context())
        return span

    def _part(self, name: str, attributes: Mapping[str, int]) -> Span:
        return self._tracer.start_span(name, self._within, attributes=attributes)

    def on_answer(self, payload: Sequence[Buffer], outcomes: Collection[RemoteOutcome], error_code: int = 0) -> None:
        """The answer is complete. The client's span ends when it has left."""
        self._is_answered = True
        remote_bytes = sum(0 if outcome.read is None else outcome.read.size_bytes for outcome in outcomes)
        sizes = {"tidegate.answer.bytes": sum(map(len, payload)), "tidegate.answer.remote_bytes": remote_bytes}
        self._span.set_attributes(sizes)
        _fail_with(self._span, {error_code, *(outcome.error_code for outcome in outcomes)})

    def ends_after(self, on_sent: Callable[[], None]) -> Callable[[], None]:
        """Returns the function to call when the answer has left, or never will. It calls `on_sent` first."""

        def sent() -> None:
            on_sent()
            if self._refused_count is None:
                fail(self._broker, ABANDONED)
                self._broker.end()
            if not self._is_answered:
                fail(self._span, ABANDONED)
            self._span.end()

        return sent


def begin_trace(
    tracer: Tracer, exchange: Exchange, parsed: FetchRequest, client_id: str, now_ms: int
) -> FetchTrace | None:
    """Begins the trace of a request. `now_ms` is monotonic. None: the trace is not sampled."""
    request = exchange.request
    attributes: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.operation.name": "Fetch",
        "messaging.operation.type": "receive",
        "messaging.client.id": client_id,
        "tidegate.kafka.api_version": request.api_version,
        "tidegate.kafka.correlation_id": request.correlation_id,
        "tidegate.fetch.partitions": len(parsed.partitions),
    }
    began_ns = time.time_ns() - (now_ms - request.received_at_ms) * _NS_PER_MS
    span = tracer.start_span("Fetch", Context(), SpanKind.SERVER, attributes, start_time=began_ns)
    return FetchTrace(tracer, span, exchange, began_ns) if span.is_recording() else None


def _fail_with(span: Span, codes: set[int]) -> None:
    known = set(ErrorCode)
    names = [ErrorCode(code).name if code in known else f"error {code}" for code in sorted(codes - {0})]
    if names:
        fail(span, ", ".join(names))
