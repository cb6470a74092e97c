"""A tracer that keeps the spans, for tests of what the parts of a Fetch tell."""

from __future__ import annotations

from collections.abc import Iterator

from tiers.tracing import Attribute, Attributes


class RecordedSpan:
    """`parent` is the context of the parent, "" for the root of a trace."""

    def __init__(
        self, tracer: RecordingTracer, name: str, attributes: Attributes, parent: str, began_at_ms: int | None = None
    ) -> None:
        self.name = name
        self.attributes: dict[str, Attribute] = dict(attributes)
        self.parent = parent
        self.began_at_ms = began_at_ms
        self.context = f"span-{len(tracer.spans)}"
        self.errors: list[str] = []
        self.used: list[str] = []
        self.ends = 0
        self._tracer = tracer
        tracer.spans.append(self)

    def child(
        self, name: str, attributes: Attributes, *, is_call: bool = False, began_at_ms: int | None = None
    ) -> RecordedSpan:
        return RecordedSpan(self._tracer, name, attributes, self.context, began_at_ms)

    def uses(self, context: str) -> None:
        self.used.append(context)

    def found(self, attributes: Attributes) -> None:
        self.attributes |= attributes

    def failed(self, error: BaseException | str) -> None:
        self.errors.append(type(error).__name__ if isinstance(error, BaseException) else error)

    def end(self) -> None:
        self.ends += 1


class RecordingTracer:
    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []
        self.is_sampling = True

    def begin(self, name: str, attributes: Attributes, began_at_ms: int) -> RecordedSpan | None:
        return RecordedSpan(self, name, attributes, "", began_at_ms) if self.is_sampling else None

    def child_of(self, context: str, name: str, attributes: Attributes, *, is_call: bool = False) -> RecordedSpan:
        return RecordedSpan(self, name, attributes, context)

    def of(self, name: str) -> list[RecordedSpan]:
        return [span for span in self.spans if span.name == name]

    def tree(self) -> list[str]:
        """Returns a line per span, below its parent and indented, with the errors."""
        return [line for span in self.spans if not span.parent for line in self._lines(span, "")]

    def _lines(self, span: RecordedSpan, indent: str) -> Iterator[str]:
        yield " ".join([f"{indent}{span.name}", *span.errors, *([] if span.ends else ["(in progress)"])])
        for child in self.spans:
            if child.parent == span.context:
                yield from self._lines(child, f"{indent}  ")
