"""The tracer that sends spans to a collector of OpenTelemetry. Only a process with traces imports this module.

The library's own thread sends the spans in batches, from a bounded queue. When the queue is full, its oldest spans are
dropped. So a collector that is slow or down holds up no request. The proxy logs failed exports at growing intervals,
and no other line of the library.

The names of attributes follow OpenTelemetry's conventions for messaging where they fit. All others begin with
`tidegate.`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("opentelemetry is missing: run `pip install '.[otel]'` in the clone of Tidegate") from error

from protocol.errors import ErrorCode
from proxy.config import TracingConfig
from tiers.lasting_trouble import LastingTrouble
from tiers.storage.blocking_calls import BlockingCalls
from tiers.tracing import (
    BrokerAnswered,
    BrokerFetch,
    ClientFetch,
    FetchAnswered,
    Judged,
    Judging,
    Outcome,
    PartitionRead,
    PurgatoryWait,
    RecordsRead,
    StoreAnswered,
    StoreRead,
    Waited,
    Work,
)

logger = logging.getLogger(__name__)

Attribute = str | bool | int | float | Sequence[str]

FLUSH_S: Final = 2.0
"""How long the end of the process waits for the last spans to leave."""
_MAX_TEXT: Final = 1_000
_NS_PER_MS: Final = 1_000_000
_LIBRARY: Final = "opentelemetry"
"""The library's loggers are below this one, and those of its exporters below the next one."""
_EXPORTERS: Final = f"{_LIBRARY}.exporter"
_propagator: Final = TraceContextTextMapPropagator()


class OpenTelemetrySpan:
    """Implements `Span`."""

    def __init__(self, tracer: OpenTelemetryTracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def context(self) -> str:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier["traceparent"]

    def child(self, work: Work, began_at_ms: int | None = None) -> OpenTelemetrySpan:
        return self._tracer.started(work, set_span_in_context(self._span, Context()), began_at_ms)

    def uses(self, context: str) -> None:
        self._span.add_link(get_current_span(_context_of(context)).get_span_context())

    def found(self, outcome: Outcome) -> None:
        attributes, error = _outcome(outcome)
        self._span.set_attributes(attributes)
        if error:
            self.failed(error)

    def failed(self, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            self._span.record_exception(error)
            kind, text = type(error).__name__, str(error)
        else:
            kind, text = error, ""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, text[:_MAX_TEXT] or None))

    def end(self) -> None:
        self._span.end()


class OpenTelemetryTracer:
    """Implements `Tracer`. `wall_clock_ns` is the time that spans have; `clock_ms` is the monotonic clock."""

    def __init__(
        self, provider: TracerProvider, version: str, clock_ms: Callable[[], int], wall_clock_ns: Callable[[], int]
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tidegate", version)
        self._clock_ms = clock_ms
        self._wall_clock_ns = wall_clock_ns

    def begin(self, work: ClientFetch, began_at_ms: int) -> OpenTelemetrySpan | None:
        span = self.started(work, Context(), began_at_ms)
        return span if span._span.is_recording() else None

    def child_of(self, context: str, work: Work) -> OpenTelemetrySpan:
        return self.started(work, _context_of(context), None)

    def started(self, work: Work, context: Context, began_at_ms: int | None) -> OpenTelemetrySpan:
        name, kind, attributes = _described(work)
        age_ms = 0 if began_at_ms is None else self._clock_ms() - began_at_ms
        start_ns = self._wall_clock_ns() - age_ms * _NS_PER_MS
        return OpenTelemetrySpan(self, self._tracer.start_span(name, context, kind, attributes, start_time=start_ns))

    def discard(self) -> None:
        """Ends a tracer that has begun no span."""
        self._provider.shutdown()

    async def close(self) -> None:
        """Sends the spans in the queue, for at most `FLUSH_S`. The rest is dropped."""
        calls = BlockingCalls("tracing", 1)
        with suppress(TimeoutError):
            await calls.run(lambda _: self._provider.shutdown(), FLUSH_S)
        calls.close()


def tracer_to_collector(
    config: TracingConfig, version: str, clock_ms: Callable[[], int], wall_clock_ns: Callable[[], int]
) -> OpenTelemetryTracer:
    """Raises `ValueError` if the library cannot use its environment variables."""
    provider = provider_of(config, version, batches_to(config, clock_ms))
    return OpenTelemetryTracer(provider, version, clock_ms, wall_clock_ns)


def provider_of(config: TracingConfig, version: str, processor: SpanProcessor) -> TracerProvider:
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sampling_ratio)),
        resource=Resource.create(
            {"service.name": config.service_name, "service.version": version, "process.pid": os.getpid()}
        ),
        shutdown_on_exit=False,  # it has no deadline; `close` has one
        span_limits=SpanLimits(max_attribute_length=_MAX_TEXT),
    )
    provider.add_span_processor(processor)
    return provider


def batches_to(config: TracingConfig, clock_ms: Callable[[], int]) -> SpanProcessor:
    """Returns the processor that sends batches to the collector. It starts the library's thread."""
    library = logging.getLogger(_LIBRARY)
    library.handlers[:], library.propagate = [logging.NullHandler()], False
    return BatchSpanProcessor(_Watched(OTLPSpanExporter(f"{config.endpoint}/v1/traces"), config.endpoint, clock_ms))


class _FirstWords(logging.Handler):
    """Keeps the first warning or error of an export: the library's results have no reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or record.getMessage()


class _Watched(SpanExporter):
    """Logs that exports fail. Only the thread of the processor calls it."""

    def __init__(self, inner: SpanExporter, endpoint: str, clock_ms: Callable[[], int]) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._trouble = LastingTrouble(
            logger, "the collector takes no traces", "the collector takes traces again", clock_ms=clock_ms
        )
        self._words = _FirstWords()
        logging.getLogger(_EXPORTERS).handlers[:] = [self._words]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._words.said = ""
        try:
            result = self._inner.export(spans)
        except Exception as error:  # a defect of the library must not end its thread
            result, self._words.said = SpanExportResult.FAILURE, repr(error)
        if result is SpanExportResult.SUCCESS:
            self._trouble.ended()
        else:
            self._trouble.found(collector=self._endpoint, error=self._words.said)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def _context_of(context: str) -> Context:
    return _propagator.extract({"traceparent": context}, Context())


def _described(work: Work) -> tuple[str, SpanKind, Mapping[str, Attribute]]:
    """Returns the name, the kind and the attributes of a span."""
    match work:
        case ClientFetch():
            return (
                "Fetch",
                SpanKind.SERVER,
                {
                    "messaging.system": "kafka",
                    "messaging.operation.name": "Fetch",
                    "messaging.operation.type": "receive",
                    "messaging.client.id": work.client_id,
                    "tidegate.kafka.api_version": work.api_version,
                    "tidegate.kafka.correlation_id": work.correlation_id,
                    "tidegate.fetch.partitions": work.partition_count,
                },
            )
        case BrokerFetch():
            node = {} if work.node_id is None else {"tidegate.kafka.node_id": work.node_id}
            return "forward Fetch", SpanKind.CLIENT, {"messaging.system": "kafka", **node}
        case Judging():
            return "judge", SpanKind.INTERNAL, {"tidegate.fetch.partitions": work.partition_count}
        case PurgatoryWait():
            return "purgatory", SpanKind.INTERNAL, {"tidegate.fetch.remote_reads": work.read_count}
        case PartitionRead():
            return (
                f"read {work.topic}".rstrip(),
                SpanKind.INTERNAL,
                {
                    **_partition(work.topic, work.partition),
                    "messaging.kafka.offset": work.offset,
                    "tidegate.topic.id": str(work.topic_id),
                    "tidegate.read.max_bytes": work.max_bytes,
                },
            )
        case StoreRead():
            places = {"start_position": work.start_position, "end_position": work.end_position}
            return (
                work.operation,
                SpanKind.CLIENT,
                {
                    **_partition(work.topic, work.partition),
                    "tidegate.segment.id": str(work.segment_id),
                    **{f"tidegate.store.{name}": place for name, place in places.items() if place is not None},
                },
            )


def _partition(topic: str, partition: int) -> dict[str, Attribute]:
    name = {"messaging.destination.name": topic} if topic else {}
    return {"messaging.system": "kafka", **name, "messaging.destination.partition.id": str(partition)}


def _outcome(outcome: Outcome) -> tuple[Mapping[str, Attribute], str]:
    """Returns attributes, and the error; "" if there is none."""
    match outcome:
        case FetchAnswered():
            names = [_error_name(code) for code in outcome.error_codes]
            sizes = {"tidegate.answer.bytes": outcome.size_bytes, "tidegate.answer.remote_bytes": outcome.remote_bytes}
            return sizes, ", ".join(names)
        case BrokerAnswered():
            refused = {"tidegate.fetch.out_of_range_partitions": outcome.out_of_range_count}
            error = _error_name(outcome.error_code) if outcome.error_code else ""
            return {**refused, "tidegate.answer.local_bytes": outcome.local_bytes}, error
        case Judged():
            return {"tidegate.verdicts": outcome.verdicts}, ""
        case Waited():
            return {"tidegate.completion": outcome.completion}, ""
        case RecordsRead():
            segment = {} if outcome.segment_id is None else {"tidegate.segment.id": str(outcome.segment_id)}
            cache = "hit" if outcome.is_cache_hit else "miss"
            return {**segment, "tidegate.read.bytes": outcome.size_bytes, "tidegate.chunk_cache": cache}, ""
        case StoreAnswered():
            return {"tidegate.store.bytes": outcome.size_bytes}, ""


def _error_name(code: int) -> str:
    return ErrorCode(code).name if code in set(ErrorCode) else f"error {code}"
