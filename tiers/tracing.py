"""The spans of one Fetch over both tiers, by the interface of OpenTelemetry.

The names of attributes follow OpenTelemetry's conventions for messaging where they fit. All others begin with
`tidegate.`. Without a tracer, no part of the proxy describes its work. A span never raises, and never waits. No span is
the current one of a task: a span is passed to its children, or named by the header `traceparent` of W3C Trace Context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_TEXT: Final = 1_000
_propagator: Final = TraceContextTextMapPropagator()

S = TypeVar("S", bound=Span | None)


def within(span: Span) -> Context:
    """Returns the context of the works that are part of `span`."""
    return set_span_in_context(span, Context())


def traceparent(span: Span) -> str:
    """Names a span for other tasks and processes."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, within(span))
    return carrier["traceparent"]


def within_named(name: str) -> Context:
    """Returns the context of the works that are part of the span that `traceparent` named."""
    return _propagator.extract({"traceparent": name}, Context())


def fail(span: Span, error: BaseException | str) -> None:
    if isinstance(error, BaseException):
        span.record_exception(error)
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = error, ""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, text[:MAX_TEXT] or None))


@contextmanager
def spanned(span: S) -> Iterator[S]:
    """Ends the span with the body, and notes the error that the body raises. None: there is no trace."""
    try:
        yield span
    except BaseException as error:
        if span is not None:
            fail(span, error)
        raise
    finally:
        if span is not None:
            span.end()


def partition_attributes(topic: str, partition: int) -> dict[str, str]:
    """`topic` is "" if the name is not known."""
    name = {"messaging.destination.name": topic} if topic else {}
    return {"messaging.system": "kafka", **name, "messaging.destination.partition.id": str(partition)}


_name: ContextVar[str] = ContextVar("trace", default="")


@contextmanager
def in_trace(name: str) -> Iterator[None]:
    """Downloads that the body begins are parts of the named work, however long they take."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def current_trace() -> str:
    """Returns the name of the work that this task is part of; "" if there is no trace."""
    return _name.get()
