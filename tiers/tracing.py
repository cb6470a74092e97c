"""The seam of traces: the works of one Fetch over both tiers, and the tracer that makes a span of each.

The names of attributes follow OpenTelemetry's conventions for messaging where they fit. All others begin with
`tidegate.`. Without a tracer, no part of the proxy describes its work. A span never raises, and never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


class Span(Protocol):
    """One work in progress."""

    @property
    def context(self) -> str:
        """Names the span for other tasks and processes, as the header `traceparent` of W3C Trace Context does."""

    def child(
        self, name: str, attributes: Attributes, *, is_call: bool = False, began_at_ms: int | None = None
    ) -> Span:
        """Begins a work that is part of this one. `is_call`: it is a request to a broker or to the store.

        `began_at_ms` is a time of the monotonic clock. None: now."""

    def uses(self, context: str) -> None:
        """Notes that this work uses the result of a work of another trace."""

    def found(self, attributes: Attributes) -> None: ...

    def failed(self, error: BaseException | str) -> None: ...

    def end(self) -> None:
        """Ends the work. Called once."""


class Tracer(Protocol):
    def begin(self, name: str, attributes: Attributes, began_at_ms: int) -> Span | None:
        """Begins a trace with a client's request. None: the trace is not sampled."""

    def child_of(self, context: str, name: str, attributes: Attributes, *, is_call: bool = False) -> Span:
        """Begins a work that is part of the work that `context` names."""


def partition_attributes(topic: str, partition: int) -> dict[str, Attribute]:
    """`topic` is "" if the name is not known."""
    name = {"messaging.destination.name": topic} if topic else {}
    return {"messaging.system": "kafka", **name, "messaging.destination.partition.id": str(partition)}


S = TypeVar("S", bound=Span | None)


@contextmanager
def spanned(span: S) -> Iterator[S]:
    """Ends the span with the body, and notes the error that the body raises. None: there is no trace."""
    if span is None:
        yield span
        return
    try:
        yield span
    except BaseException as error:
        span.failed(error)
        raise
    finally:
        span.end()


_context: ContextVar[str] = ContextVar("trace", default="")


@contextmanager
def in_trace(context: str) -> Iterator[None]:
    """Downloads that the body begins are parts of the work that `context` names, however long they take."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> str:
    """Returns the name of the work that this task is part of; "" if there is no trace."""
    return _context.get()
