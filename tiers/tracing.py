"""The seam of traces: the works of one Fetch over both tiers, and the tracer that makes a span of each.

A part of the proxy says what it does and what came of it. It knows no names of OpenTelemetry. Without a tracer, no part
says anything. A span never raises, and never waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypeVar
from uuid import UUID


class ClientFetch(NamedTuple):
    """A client's Fetch, from its receipt until the last byte of the answer has left."""

    client_id: str
    correlation_id: int
    api_version: int
    partition_count: int


class FetchAnswered(NamedTuple):
    """`error_codes` are Kafka's, of the answer and of the partitions that the broker refused."""

    size_bytes: int
    remote_bytes: int
    error_codes: tuple[int, ...]


class BrokerFetch(NamedTuple):
    """The broker's part: the forwarded request, until its response is complete. None: the broker's id is unknown."""

    node_id: int | None


class BrokerAnswered(NamedTuple):
    """`out_of_range_count` partitions had the error OFFSET_OUT_OF_RANGE."""

    local_bytes: int
    out_of_range_count: int
    error_code: int


class Judging(NamedTuple):
    """The decision what OFFSET_OUT_OF_RANGE means. It may ask for fresh metadata, or for the leader's bounds."""

    partition_count: int


class Judged(NamedTuple):
    """The verdicts, each one once."""

    verdicts: tuple[str, ...]


class PurgatoryWait(NamedTuple):
    """The wait of a Fetch for its remote reads, and for new records of its local partitions."""

    read_count: int


class Waited(NamedTuple):
    completion: str


class PartitionRead(NamedTuple):
    """The read of one partition from the remote tier, with its retries. `topic` is "" if the name is not known."""

    topic: str
    topic_id: UUID
    partition: int
    offset: int
    max_bytes: int


class RecordsRead(NamedTuple):
    """`segment_id` is None if a fetch quota was used up. A hit: the chunk of the first record was in memory."""

    segment_id: UUID | None
    size_bytes: int
    is_cache_hit: bool


class StoreRead(NamedTuple):
    """One call of the store. The positions are those of the stored `.log`, both inclusive.

    None: the operation reads a whole object."""

    operation: str
    topic: str
    partition: int
    segment_id: UUID
    start_position: int | None = None
    end_position: int | None = None


class StoreAnswered(NamedTuple):
    size_bytes: int


Work = ClientFetch | BrokerFetch | Judging | PurgatoryWait | PartitionRead | StoreRead
Outcome = FetchAnswered | BrokerAnswered | Judged | Waited | RecordsRead | StoreAnswered


class Span(Protocol):
    """One work in progress."""

    @property
    def context(self) -> str:
        """Names the span for other tasks and processes, as the header `traceparent` of W3C Trace Context does."""

    def child(self, work: Work, began_at_ms: int | None = None) -> Span:
        """Begins a work that is part of this one. `began_at_ms` is a time of the monotonic clock. None: now."""

    def uses(self, context: str) -> None:
        """Notes that this work uses the result of a work of another trace."""

    def found(self, outcome: Outcome) -> None: ...

    def failed(self, error: BaseException | str) -> None: ...

    def end(self) -> None:
        """Ends the work. Called once."""


class Tracer(Protocol):
    def begin(self, work: ClientFetch, began_at_ms: int) -> Span | None:
        """Begins a trace. None: the trace is not sampled. `began_at_ms` is a time of the monotonic clock."""

    def child_of(self, context: str, work: Work) -> Span:
        """Begins a work that is part of the work that `context` names."""


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
