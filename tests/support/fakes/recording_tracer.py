"""A tracer that keeps the spans, for tests of what the parts of a Fetch tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from tiers.tracing import ClientFetch, Outcome, Work

W = TypeVar("W")


class RecordedSpan:
    """`parent` is the context of the parent, "" for the root of a trace."""

    def __init__(self, tracer: RecordingTracer, work: Work, parent: str, began_at_ms: int | None) -> None:
        self.work = work
        self.parent = parent
        self.began_at_ms = began_at_ms
        self.context = f"span-{len(tracer.spans)}"
        self.outcomes: list[Outcome] = []
        self.errors: list[str] = []
        self.used: list[str] = []
        self.ends = 0
        self._tracer = tracer
        tracer.spans.append(self)

    def child(self, work: Work, began_at_ms: int | None = None) -> RecordedSpan:
        return RecordedSpan(self._tracer, work, self.context, began_at_ms)

    def uses(self, context: str) -> None:
        self.used.append(context)

    def found(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def failed(self, error: BaseException | str) -> None:
        self.errors.append(type(error).__name__ if isinstance(error, BaseException) else error)

    def end(self) -> None:
        self.ends += 1


class RecordingTracer:
    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []
        self.is_sampling = True

    def begin(self, work: ClientFetch, began_at_ms: int) -> RecordedSpan | None:
        return RecordedSpan(self, work, "", began_at_ms) if self.is_sampling else None

    def child_of(self, context: str, work: Work) -> RecordedSpan:
        return RecordedSpan(self, work, context, None)

    def of(self, kind: type[W]) -> list[RecordedSpan]:
        return [span for span in self.spans if isinstance(span.work, kind)]

    def tree(self) -> list[str]:
        """Returns a line per span, below its parent and indented, with the outcomes and the errors."""
        return [line for span in self.spans if not span.parent for line in self._lines(span, "")]

    def _lines(self, span: RecordedSpan, indent: str) -> Iterator[str]:
        said = [type(outcome).__name__ for outcome in span.outcomes] + span.errors
        yield f"{indent}{type(span.work).__name__}: {', '.join(said)}{'' if span.ends else ' (in progress)'}"
        for child in self.spans:
            if child.parent == span.context:
                yield from self._lines(child, f"{indent}  ")
