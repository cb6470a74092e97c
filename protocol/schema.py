"""A walker over any message of any API and version, by Kafka's own schema: it yields where each field lies.

A field is then replaced by splicing bytes, so unknown tags and everything untouched survive verbatim. A schema and a
version are compiled once to a tree of nodes, one class per wire shape; `skip` runs over a message, `walk` reports every
byte of it, and a `Selector` finds the fields of one struct path and stops as soon as it has passed the last.

Positions only grow, so the fixed-size nodes do not look at the buffer's end: whoever hands out positions checks the
last one. All bounds and counts are checked before anything is allocated (semantics 1.2), and malformed bytes raise
`ProtocolError` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from protocol.errors import LimitExceededError, ProtocolError, TruncatedError
from protocol.message_schema import FieldSchema, MessageKind, MessageSchema, load_schema, message_name
from protocol.primitives import (
    MAX_TAGGED_FIELDS,
    Buffer,
    read_array_length,
    read_bytes_bounds,
    read_int8,
    read_string_bounds,
    read_uvarint,
    skip_tagged_section,
)

Path = tuple[str | int, ...]
"""Field names as in the schema, and the index after the name of an array: `("Brokers", 0, "Host")`."""

SpanKind = Literal["value", "length", "tag_count", "tag", "unknown_tag"]


class FieldSpan(NamedTuple):
    """`[start, end)` of one thing on the wire; the spans of a message touch each other and cover all of it.

    `value`: a primitive, the length prefix of a string, bytes or records included. `length`: the count of an array, or
    the presence byte of a nullable struct. `tag_count`: the head of a tagged section; its path is that of the struct.
    `tag`: the number and size before a known tagged field's value. `unknown_tag`: number, size and bytes of one that
    the schema does not know; its path is that of the struct, then the number.
    """

    path: Path
    kind: SpanKind
    start: int
    end: int


class Span(NamedTuple):
    start: int
    end: int


class TagSize(NamedTuple):
    """The uvarint size of a tagged field, at `[start, end)`, and where the value it measures ends."""

    start: int
    end: int
    value_end: int


class Selection(NamedTuple):
    """What a `Selector` found, in wire order."""

    structs: list[tuple[Span, ...]]
    """One entry per struct at the path: the spans of the named fields, in the order of the names, prefixes included."""
    tag_sizes: list[TagSize]
    """The sizes that change with the length of what was selected: those of tagged fields on the path."""


class _Node(ABC):
    """A value's shape on the wire."""

    fixed_size: int | None = None

    @abstractmethod
    def skip(self, buf: Buffer, pos: int) -> int: ...

    @abstractmethod
    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int: ...


class _Fixed(_Node):
    def __init__(self, size: int) -> None:
        self.fixed_size = size
        self._size = size

    def skip(self, buf: Buffer, pos: int) -> int:
        return pos + self._size

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        end = _checked_end(buf, pos + self._size)
        spans.append(FieldSpan(path, "value", pos, end))
        return end


class _LengthPrefixed(_Node):
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
            raise ProtocolError(f"null at {pos} in a field that cannot be")
        return start

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        end = self.skip(buf, pos)
        spans.append(FieldSpan(path, "value", pos, end))
        return end


class _Array(_Node):
    def __init__(self, element: _Node, compact: bool, nullable: bool) -> None:
        self.element = element
        self._element_size = element.fixed_size
        self._compact = compact
        self._nullable = nullable

    def read_length(self, buf: Buffer, pos: int) -> tuple[int, int]:
        """The number of elements, 0 for null, and where the first begins."""
        length, pos = read_array_length(buf, pos, self._compact)
        if length >= 0:
            return length, pos
        if not self._nullable:
            raise ProtocolError(f"null at {pos} in an array that cannot be")
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


class _NullableStruct(_Node):
    """A struct after one byte that says whether it is there: negative for null (KIP-893)."""

    def __init__(self, struct: _Struct) -> None:
        self.struct = struct

    def skip(self, buf: Buffer, pos: int) -> int:
        presence, pos = read_int8(buf, pos)
        return pos if presence < 0 else self.struct.skip(buf, pos)

    def walk(self, buf: Buffer, pos: int, path: Path, spans: list[FieldSpan]) -> int:
        presence, start = read_int8(buf, pos)
        spans.append(FieldSpan(path, "length", pos, start))
        return start if presence < 0 else self.struct.walk(buf, start, path, spans)


class _Struct(_Node):
    """Fields in wire order, then a tagged section in flexible versions."""

    def __init__(
        self, fields: Sequence[tuple[str, _Node]], tagged: Mapping[int, tuple[str, _Node]], flexible: bool
    ) -> None:
        self.fields = tuple(fields)
        self.tagged = dict(tagged)
        self.flexible = flexible
        self._steps, self._tail = _merge_fixed(node for _, node in self.fields)
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
                    raise ProtocolError(f"tagged field {name} at {start} is not of the size that its tag says")
            pos = end
        return pos


def read_tag_count(buf: Buffer, pos: int) -> tuple[int, int]:
    """How many tagged fields follow. Raises `LimitExceededError`."""
    count, pos = read_uvarint(buf, pos)
    if count > MAX_TAGGED_FIELDS:
        raise LimitExceededError(f"a tagged section of {count} fields; the limit is {MAX_TAGGED_FIELDS}")
    return count, pos


def read_tag(buf: Buffer, pos: int) -> tuple[int, int, int, int]:
    """`(tag, where its size is written, where the value starts, where it ends)`."""
    tag, size_at = read_uvarint(buf, pos)
    size, start = read_uvarint(buf, size_at)
    return tag, size_at, start, _checked_end(buf, start + size)


def _checked_end(buf: Buffer, end: int) -> int:
    if end > len(buf):
        raise TruncatedError(f"a field that ends at {end} of {len(buf)} bytes")
    return end


Skip = Callable[[Buffer, int], int]


def _merge_fixed(nodes: Iterable[_Node]) -> tuple[tuple[tuple[int, Skip], ...], int]:
    """Runs of fixed-size fields become one addition: `(bytes before, skip)` per field that varies; bytes after them."""
    steps: list[tuple[int, Skip]] = []
    size = 0
    for node in nodes:
        if node.fixed_size is not None:
            size += node.fixed_size
        else:
            steps.append((size, node.skip))
            size = 0
    return tuple(steps), size


_Visit = Callable[[Buffer, int, Selection], int]


class Selector:
    """Finds the named fields of every struct at one path; compiled by `MessagePlan.selector`."""

    __slots__ = ("_visit",)

    def __init__(self, visit: _Visit) -> None:
        self._visit = visit

    def __call__(self, buf: Buffer, pos: int) -> Selection:
        """`pos`: where the message's body begins. Nothing after the last selected field is looked at."""
        selection = Selection([], [])
        _checked_end(buf, self._visit(buf, pos, selection))
        return selection


class MessagePlan:
    """One message in one version."""

    __slots__ = ("_root", "schema", "version")

    def __init__(self, schema: MessageSchema, version: int) -> None:
        if version not in schema.valid_versions:
            raise ProtocolError(f"{schema.name} has no version {version}")
        self.schema = schema
        self.version = version
        self._root = _compile_struct(schema.fields, version, version in schema.flexible_versions)

    @property
    def is_flexible(self) -> bool:
        return self._root.flexible

    def skip(self, buf: Buffer, pos: int) -> int:
        """Where the message that begins at `pos` ends. Known tagged fields are skipped by their size as well."""
        return _checked_end(buf, self._root.skip(buf, pos))

    def walk(self, buf: Buffer, pos: int) -> list[FieldSpan]:
        """Every field of the message that begins at `pos`, in wire order; bytes after its end are not looked at.

        The answer is many times larger than the message: for messages of known size, and for tests.
        """
        spans: list[FieldSpan] = []
        self._root.walk(buf, pos, (), spans)
        return spans

    def selector(self, path: tuple[str, ...], names: tuple[str, ...]) -> Selector:
        """For fields `names` of the structs at `path`, arrays on it visited element by element; `()` is the message.

        The names are given in wire order. Raises `ValueError` when this version has no such fields.
        """
        return Selector(_compile_visit(self._root, path, names, last=True))


def _compile_visit(struct: _Struct, path: tuple[str, ...], names: tuple[str, ...], *, last: bool) -> _Visit:
    """`last`: nothing that follows the selection in this struct needs to be passed over."""
    if not path:
        return _visit_leaf(struct, names, last=last)
    for position, (name, node) in enumerate(struct.fields):
        if name == path[0]:
            inner = _visit_value(node, path[1:], names, last=False)
            return _visit_field(struct, position, inner, last=last)
    for tag, (name, node) in struct.tagged.items():
        if name == path[0]:
            return _visit_tagged(struct, tag, _visit_value(node, path[1:], names, last=False))
    raise ValueError(f"no field {path[0]}")


def _visit_value(node: _Node, path: tuple[str, ...], names: tuple[str, ...], *, last: bool) -> _Visit:
    if isinstance(node, _Struct):
        return _compile_visit(node, path, names, last=last)
    if isinstance(node, _NullableStruct):
        visit_struct = _compile_visit(node.struct, path, names, last=last)

        def visit_nullable(buf: Buffer, pos: int, selection: Selection) -> int:
            presence, pos = read_int8(buf, pos)
            return pos if presence < 0 else visit_struct(buf, pos, selection)

        return visit_nullable
    if isinstance(node, _Array):
        visit_element = _visit_value(node.element, path, names, last=last)
        read_length = node.read_length

        def visit_array(buf: Buffer, pos: int, selection: Selection) -> int:
            length, pos = read_length(buf, pos)
            for _ in range(length):
                pos = visit_element(buf, pos, selection)
            return pos

        return visit_array
    raise ValueError(f"{names} are asked of a primitive")


def _visit_leaf(struct: _Struct, names: tuple[str, ...], *, last: bool) -> _Visit:
    present = [name for name, _ in struct.fields]
    if not names or [name for name in present if name in names] != list(names):
        raise ValueError(f"fields {names} of a struct that has {present}")
    steps: list[tuple[int, Skip, bool]] = []
    size = 0
    for name, node in struct.fields:
        if name not in names and node.fixed_size is not None:
            size += node.fixed_size
            continue
        steps.append((size, node.skip, name in names))
        size = 0
        if last and name == names[-1]:
            break
    tail = 0 if last else size
    skip_tags = struct.flexible and not last

    def visit(buf: Buffer, pos: int, selection: Selection) -> int:
        spans: list[Span] = []
        for before, skip, selected in steps:
            pos += before
            end = skip(buf, pos)
            if selected:
                spans.append(Span(pos, end))
            pos = end
        pos += tail
        # Checked here, so that an array of fixed-size structs cannot grow past the bytes there are.
        selection.structs.append(tuple(spans))
        return skip_tagged_section(buf, pos) if skip_tags else _checked_end(buf, pos)

    return visit


def _visit_field(struct: _Struct, position: int, inner: _Visit, *, last: bool) -> _Visit:
    before, before_tail = _merge_fixed(node for _, node in struct.fields[:position])
    after, after_tail = _merge_fixed(node for _, node in struct.fields[position + 1 :])
    flexible = struct.flexible

    def visit(buf: Buffer, pos: int, selection: Selection) -> int:
        for size, skip in before:
            pos = skip(buf, pos + size)
        pos = inner(buf, pos + before_tail, selection)
        if last:
            return pos
        for size, skip in after:
            pos = skip(buf, pos + size)
        pos += after_tail
        return skip_tagged_section(buf, pos) if flexible else pos

    return visit


def _visit_tagged(struct: _Struct, wanted: int, inner: _Visit) -> _Visit:
    steps, tail = _merge_fixed(node for _, node in struct.fields)

    def visit(buf: Buffer, pos: int, selection: Selection) -> int:
        for size, skip in steps:
            pos = skip(buf, pos + size)
        count, pos = read_tag_count(buf, pos + tail)
        first = pos
        for _ in range(count):
            tag, size_at, start, end = read_tag(buf, pos)
            if tag == wanted:
                if selection.tag_sizes and selection.tag_sizes[-1].start >= first:
                    raise ProtocolError(f"tag {tag} twice in one section")
                selection.tag_sizes.append(TagSize(size_at, start, end))
                if inner(buf, start, selection) != end:
                    raise ProtocolError(f"tagged field {tag} at {start} is not of the size that its tag says")
            pos = end
        return pos

    return visit


_FIXED_SIZES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "float64": 8,
    "uuid": 16,
}


def _compile_struct(fields: tuple[FieldSchema, ...], version: int, flexible: bool) -> _Struct:
    plain: list[tuple[str, _Node]] = []
    tagged: dict[int, tuple[str, _Node]] = {}
    for field in fields:
        if version not in field.versions:
            continue
        entry = field.name, _compile_field(field, version, flexible)
        if field.tag is not None and version in field.tagged_versions:
            tagged[field.tag] = entry
        else:
            plain.append(entry)
    return _Struct(plain, tagged, flexible)


def _compile_field(field: FieldSchema, version: int, flexible: bool) -> _Node:
    compact = flexible if field.flexible_versions is None else version in field.flexible_versions
    nullable = version in field.nullable_versions
    if field.is_array:
        return _Array(_compile_value(field, version, compact, nullable=False), compact, nullable)
    return _compile_value(field, version, compact, nullable=nullable)


def _compile_value(field: FieldSchema, version: int, compact: bool, *, nullable: bool) -> _Node:
    name = field.element_type
    if name in _FIXED_SIZES:
        return _Fixed(_FIXED_SIZES[name])
    if name == "string":
        return _LengthPrefixed(read_string_bounds, compact, nullable)
    if name in ("bytes", "records"):
        return _LengthPrefixed(read_bytes_bounds, compact, nullable)
    struct = _compile_struct(field.fields, version, compact)
    return _NullableStruct(struct) if nullable else struct


@cache
def compile_schema(name: str, version: int) -> MessagePlan:
    """By the schema's own name, for what is not an API message. Raises `ProtocolError` as `compile_message` does."""
    return MessagePlan(load_schema(name), version)


@cache
def compile_message(api_key: int, version: int, kind: MessageKind) -> MessagePlan:
    """Compiled once. Raises `ProtocolError` for an API, or a version of it, that has no schema."""
    return compile_schema(message_name(api_key, kind), version)
