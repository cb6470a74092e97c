"""The shapes that values have on the wire, one class each. A schema compiles to a tree of shapes.

`skip` returns the end of a value. `walk` reports every byte of it as spans. Positions only grow, so `skip` of a
fixed-size shape does not check the end of the buffer: the caller checks the last position instead. The readers check
all bounds and counts before they allocate anything (docs/semantics.md 1.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    Buffer,
    read_array_length,
    read_int8,
    read_tag,
    read_tag_count,
    skip_tagged_section,
)

Skip = Callable[[Buffer, int], int]

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

    @abstractmethod
    def skip(self, buf: Buffer, pos: int) -> int: ...

    @abstractmethod
    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int: ...


class Fixed(Shape):
    def __init__(self, size: int) -> None:
        self.fixed_size = size
        self._size = size

    def skip(self, buf: Buffer, pos: int) -> int:
        return pos + self._size

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

    def skip(self, buf: Buffer, pos: int) -> int:
        start, end = self._read_bounds(buf, pos, self._compact)
        if end >= 0:
            return end
        if not self._nullable:
            raise ProtocolError(f"null at {pos} in a field that is not nullable", pos)
        return start

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        end = self.skip(buf, pos)
        spans.append(FieldSpan(path, "value", pos, end))
        return end


class Array(Shape):
    def __init__(self, element: Shape, compact: bool, nullable: bool) -> None:
        self.element = element
        self._element_size = element.fixed_size
        self._compact = compact
        self._nullable = nullable

    def read_length(self, buf: Buffer, pos: int) -> tuple[int, int]:
        """Returns the number of elements (0 for null) and the position of the first element."""
        length, pos = read_array_length(buf, pos, self._compact)
        if length >= 0:
            return length, pos
        if not self._nullable:
            raise ProtocolError(f"null at {pos} for an array that is not nullable", pos)
        return 0, pos

    def skip(self, buf: Buffer, pos: int) -> int:
        length, pos = self.read_length(buf, pos)
        if self._element_size is not None:
            return pos + length * self._element_size
        skip = self.element.skip
        for _ in range(length):
            pos = skip(buf, pos)
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

    def skip(self, buf: Buffer, pos: int) -> int:
        presence, pos = read_int8(buf, pos)
        return pos if presence < 0 else self.struct.skip(buf, pos)

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

    def skip(self, buf: Buffer, pos: int) -> int:
        for size, skip in self._steps:
            pos = skip(buf, pos + size)
        pos += self._tail
        return skip_tagged_section(buf, pos) if self.flexible else pos

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


def merge_fixed(nodes: Iterable[Shape]) -> tuple[tuple[tuple[int, Skip], ...], int]:
    """Merges each run of fixed-size fields into one addition.

    Returns one `(bytes before the field, skip)` per field of variable size, and the number of bytes after the last one.
    """
    steps: list[tuple[int, Skip]] = []
    size = 0
    for node in nodes:
        if node.fixed_size is not None:
            size += node.fixed_size
        else:
            steps.append((size, node.skip))
            size = 0
    return tuple(steps), size
