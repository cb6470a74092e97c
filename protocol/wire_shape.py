"""The shapes that values have on the wire, one class each. A schema compiles to a tree of shapes.

`skip` returns the end of a value, in steps. `walk` reports every byte of it as spans. Positions only grow, so a
fixed-size shape does not check the end of the buffer: the caller checks the last position instead. The readers check
all bounds and counts before they allocate anything (docs/semantics.md 1.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    Buffer,
    read_array_length,
    read_int8,
    read_tag,
    read_tag_count,
    skip_tags,
)
from protocol.steps import Steps

End = Callable[[Buffer, int], int]
Skip = Callable[[Buffer, int], Steps[int]]

Path = tuple[str | int, ...]
"""Field names as in the schema. After the name of an array comes the element's index: `("Brokers", 0, "Host")`."""

SpanKind = Literal["value", "length", "tag_count", "tag", "unknown_tag"]


class FieldSpan(NamedTuple):
    """The bytes `[start, end)` of one item of a message. The spans of a message cover it without gaps or overlaps.

    `value` is a primitive; for a string, bytes or records it includes the length prefix. `length` is the count of an
    array, or the presence byte of a nullable struct. `tag_count` is the number of fields in a tagged section; its path
    is the struct's path. `tag` is the number and size before the value of a known tagged field. `unknown_tag` is the
    number, the size and the bytes of a tagged field that the schema does not know; its path is the struct's path and
    then the tag's number.
    """

    path: Path
    kind: SpanKind
    start: int
    end: int


class Shape(ABC):
    """A value's shape on the wire."""

    fixed_size: int | None = None
    end: End | None = None
    """Returns the end of a value in a single step. None: the value may have many items."""

    def skip(self, buf: Buffer, pos: int) -> Steps[int]:
        """Returns the end of a value. A shape without an `end` overrides it."""
        assert self.end is not None
        yield
        return self.end(buf, pos)

    @abstractmethod
    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int: ...


Fields = tuple[tuple[int, Shape], ...]


class Fixed(Shape):
    def __init__(self, size: int) -> None:
        self.fixed_size = size
        self.end = lambda _, pos: pos + size
        self._size = size

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        end = checked_end(buf, pos + self._size)
        spans.append(FieldSpan(path, "value", pos, end))
        return end


class LengthPrefixed(Shape):
    def __init__(
        self, read_bounds: Callable[[Buffer, int, bool], tuple[int, int]], compact: bool, nullable: bool
    ) -> None:
        self._read_bounds = read_bounds
        self._compact = compact
        self._nullable = nullable
        self.end = self._end

    def _end(self, buf: Buffer, pos: int) -> int:
        start, end = self._read_bounds(buf, pos, self._compact)
        if end >= 0:
            return end
        if not self._nullable:
            raise ProtocolError(f"null at {pos} in a field that is not nullable", pos)
        return start

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        end = self._end(buf, pos)
        spans.append(FieldSpan(path, "value", pos, end))
        return end


class Array(Shape):
    def __init__(self, element: Shape, compact: bool, nullable: bool) -> None:
        self.element = element
        self._compact = compact
        self._nullable = nullable
        if (size := element.fixed_size) is not None:
            self.end = partial(self._end_of_fixed, size)

    def read_length(self, buf: Buffer, pos: int) -> tuple[int, int]:
        """Returns the number of elements (0 for null) and the position of the first element."""
        length, pos = read_array_length(buf, pos, self._compact)
        if length >= 0:
            return length, pos
        if not self._nullable:
            raise ProtocolError(f"null at {pos} for an array that is not nullable", pos)
        return 0, pos

    def _end_of_fixed(self, size: int, buf: Buffer, pos: int) -> int:
        length, pos = self.read_length(buf, pos)
        return pos + length * size

    def skip(self, buf: Buffer, pos: int) -> Steps[int]:
        length, pos = self.read_length(buf, pos)
        end, skip = self.element.end, self.element.skip
        for _ in range(length):
            pos = (yield from skip(buf, pos)) if end is None else end(buf, pos)
            yield
        return pos

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        length, start = self.read_length(buf, pos)
        spans.append(FieldSpan(path, "length", pos, start))
        pos = start
        for index in range(length):
            pos = self.element.walk(buf, pos, (*path, index), spans)
        return pos


class NullableStruct(Shape):
    """A struct that follows a presence byte; a negative presence byte means null (KIP-893)."""

    def __init__(self, struct: Struct) -> None:
        self.struct = struct

    def skip(self, buf: Buffer, pos: int) -> Steps[int]:
        presence, pos = read_int8(buf, pos)
        return pos if presence < 0 else (yield from self.struct.skip(buf, pos))

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        presence, start = read_int8(buf, pos)
        spans.append(FieldSpan(path, "length", pos, start))
        return start if presence < 0 else self.struct.walk(buf, start, path, spans)


class Struct(Shape):
    """Fields in wire order; in flexible versions a tagged section follows them."""

    def __init__(
        self, fields: Sequence[tuple[str, Shape]], tagged: Mapping[int, tuple[str, Shape]], flexible: bool
    ) -> None:
        self.fields = tuple(fields)
        self.tagged = dict(tagged)
        self.flexible = flexible
        self._steps, self._tail = merge_fixed(node for _, node in self.fields)
        if not self._steps and not flexible:
            self.fixed_size = self._tail
        if not flexible and all(field.end is not None for _, field in self._steps):
            self.end = self._end

    def _end(self, buf: Buffer, pos: int) -> int:
        for size, field in self._steps:
            assert field.end is not None
            pos = field.end(buf, pos + size)
        return pos + self._tail

    def skip(self, buf: Buffer, pos: int) -> Steps[int]:
        pos = yield from skip_fields(self._steps, self._tail, buf, pos)
        return (yield from skip_tags(buf, pos)) if self.flexible else pos

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        for name, node in self.fields:
            pos = node.walk(buf, pos, (*path, name), spans)
        return self._walk_tags(buf, pos, path, spans) if self.flexible else pos

    def _walk_tags(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        count, start = read_tag_count(buf, pos)
        spans.append(FieldSpan(path, "tag_count", pos, start))
        pos = start
        for _ in range(count):
            tag, _, start, end = read_tag(buf, pos)
            known = self.tagged.get(tag)
            if known is None:
                spans.append(FieldSpan((*path, tag), "unknown_tag", pos, end))
            else:
                name, node = known
                spans.append(FieldSpan((*path, name), "tag", pos, start))
                if node.walk(buf, start, (*path, name), spans) != end:
                    raise ProtocolError(
                        f"tagged field {name} at {start} does not have the size that its tag announces", start
                    )
            pos = end
        return pos


def checked_end(buf: Buffer, end: int) -> int:
    if end > len(buf):
        raise TruncatedError(f"a field ends at {end}, but the message has {len(buf)} bytes", end)
    return end


def skip_fields(fields: Fields, tail: int, buf: Buffer, pos: int) -> Steps[int]:
    """Returns the end of fields that `merge_fixed` has merged."""
    for size, field in fields:
        end = field.end
        pos = (yield from field.skip(buf, pos + size)) if end is None else end(buf, pos + size)
    return pos + tail


def merge_fixed(nodes: Iterable[Shape]) -> tuple[Fields, int]:
    """Merges each run of fixed-size fields into one addition.

    Returns one `(bytes before the field, field)` per field of variable size, and the number of bytes after the last
    one."""
    steps: list[tuple[int, Shape]] = []
    size = 0
    for node in nodes:
        if node.fixed_size is not None:
            size += node.fixed_size
        else:
            steps.append((size, node))
            size = 0
    return tuple(steps), size
