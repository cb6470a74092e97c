"""The tracer that sends spans to a collector of OpenTelemetry. Only a process with traces imports this module.

The library's own thread sends the spans in batches, from a bounded queue. When the queue is full, its oldest spans are
dropped. So a collector that is slow or down holds up no request. The proxy logs failed exports at growing intervals,
and no other line of the library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.environment_variables import (
        OTEL_EXPORTER_OTLP_ENDPOINT,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
        OTEL_SERVICE_NAME,
        OTEL_TRACES_SAMPLER_ARG,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("opentelemetry is missing: run `pip install '.[otel]'` in the clone of Tidegate") from error

from tiers.lasting_trouble import LastingTrouble
from tiers.storage.blocking_calls import BlockingCalls
from tiers.tracing import Attributes

logger = logging.getLogger(__name__)

FLUSH_S: Final = 2.0
"""How long the end of the process waits for the last spans to leave."""
_SAMPLED_PART: Final = 0.01
"""The part of the Fetches that is traced by default. A traced Fetch takes about twice the CPU time."""
_COLLECTOR: Final = "http://localhost:4318"
"""The library's own default."""
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

    def child(
        self, name: str, attributes: Attributes, *, is_call: bool = False, began_at_ms: int | None = None
    ) -> OpenTelemetrySpan:
        inner = set_span_in_context(self._span, Context())
        return self._tracer.started(name, _kind(is_call), attributes, inner, began_at_ms)

    def uses(self, context: str) -> None:
        self._span.add_link(get_current_span(_context_of(context)).get_span_context())

    def found(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

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

    def begin(self, name: str, attributes: Attributes, began_at_ms: int) -> OpenTelemetrySpan | None:
        span = self.started(name, SpanKind.SERVER, attributes, Context(), began_at_ms)
        return span if span._span.is_recording() else None

    def child_of(self, context: str, name: str, attributes: Attributes, *, is_call: bool = False) -> OpenTelemetrySpan:
        return self.started(name, _kind(is_call), attributes, _context_of(context), None)

    def started(
        self, name: str, kind: SpanKind, attributes: Attributes, context: Context, began_at_ms: int | None
    ) -> OpenTelemetrySpan:
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
    version: str, clock_ms: Callable[[], int], wall_clock_ns: Callable[[], int]
) -> OpenTelemetryTracer:
    """Raises `ValueError` if the library cannot use its environment variables."""
    provider = provider_of(version, batches_to_collector(clock_ms))
    return OpenTelemetryTracer(provider, version, clock_ms, wall_clock_ns)


def provider_of(version: str, processor: SpanProcessor) -> TracerProvider:
    """Raises `ValueError` if a variable has a wrong value."""
    name = os.environ.get(OTEL_SERVICE_NAME) or "tidegate"
    part = os.environ.get(OTEL_TRACES_SAMPLER_ARG) or _SAMPLED_PART
    try:
        sampler = ParentBased(TraceIdRatioBased(float(part)))
    except ValueError:
        raise ValueError(f"{OTEL_TRACES_SAMPLER_ARG} must be a number from 0 to 1, not {part}") from None
    provider = TracerProvider(
        sampler=sampler,
        resource=Resource.create({"service.name": name, "service.version": version, "process.pid": os.getpid()}),
        shutdown_on_exit=False,  # it has no deadline; `close` has one
        span_limits=SpanLimits(max_attribute_length=_MAX_TEXT),
    )
    provider.add_span_processor(processor)
    return provider


def batches_to_collector(clock_ms: Callable[[], int]) -> SpanProcessor:
    """Returns the processor that sends batches to the collector, and starts its thread. Raises `ValueError`."""
    collector = _collector()
    library = logging.getLogger(_LIBRARY)
    library.handlers[:], library.propagate = [logging.NullHandler()], False
    return BatchSpanProcessor(_Watched(OTLPSpanExporter(), collector, clock_ms))


def _collector() -> str:
    """Returns the URL of the collector, which has no secret: the log shows it. Raises `ValueError`."""
    names = (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT)
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return _COLLECTOR
    url = urlsplit(os.environ[name])
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{name} must be a URL that begins with http:// or https://")
    if url.username is not None or url.query:
        raise ValueError(f"{name} must have no user and no query: set OTEL_EXPORTER_OTLP_HEADERS")
    return url.geturl()


class _FirstWords(logging.Handler):
    """Keeps the first warning or error of an export: the library's results have no reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or record.getMessage()


class _Watched(SpanExporter):
    """Logs that exports fail. Only the thread of the processor calls it."""

    def __init__(self, inner: SpanExporter, collector: str, clock_ms: Callable[[], int]) -> None:
        self._inner = inner
        self._collector = collector
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
            self._trouble.found(collector=self._collector, error=self._words.said)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def _context_of(context: str) -> Context:
    return _propagator.extract({"traceparent": context}, Context())


def _kind(is_call: bool) -> SpanKind:
    return SpanKind.CLIENT if is_call else SpanKind.INTERNAL
