"""Sends spans to a collector of OpenTelemetry. Only a process with traces imports this module.

The library's own thread sends the spans in batches, from a bounded queue. When the queue is full, its oldest spans are
dropped. So a collector that is slow or down holds up no request. The proxy logs failed exports at growing intervals,
and no other line of the library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

try:
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
except ImportError as error:
    raise ImportError("opentelemetry is missing: run `pip install '.[otel]'` in the clone of Tidegate") from error

from tiers.lasting_trouble import LastingTrouble
from tiers.tracing import MAX_TEXT

logger = logging.getLogger(__name__)

_SAMPLED_PART: Final = 0.01
"""The part of the Fetches that is traced by default. A traced Fetch takes about twice the CPU time."""
_COLLECTOR: Final = "http://localhost:4318"
"""The library's own default."""
_LIBRARY: Final = "opentelemetry"
"""The library's loggers are below this one, and those of its exporters below the next one."""
_EXPORTERS: Final = f"{_LIBRARY}.exporter"


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
        shutdown_on_exit=False,  # it has no deadline; `flush` has one
        span_limits=SpanLimits(max_attribute_length=MAX_TEXT),
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
