"""A walker over messages of every API and version that finds the position of each field by Kafka's own schema.

The caller replaces a field by splicing bytes, so unknown tags and all other fields survive verbatim. Each schema is
compiled once per version. `MessagePlan.skip` returns the end of a message, and `walk` reports every byte of it. A
`Selector` finds the fields of the structs at one path and stops after the last one. For malformed bytes all of them
raise `ProtocolError` and no other exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from protocol.errors import ProtocolError
from protocol.message_schema import FieldSchema, MessageKind, MessageSchema, load_schema, message_name
from protocol.primitives import (
    Buffer,
    check_items,
    read_bytes_bounds,
    read_int8,
    read_string_bounds,
    read_tag,
    read_tag_count,
    skip_tags,
)
from protocol.steps import Stepped, Steps
from protocol.wire_shape import (
    Array,
    FieldSpan,
    Fixed,
    LengthPrefixed,
    NullableStruct,
    Shape,
    Struct,
    checked_end,
    merge_fixed,
    skip_fields,
)


class Span(NamedTuple):
    start: int
    end: int


class TagSize(NamedTuple):
    """The uvarint size of a tagged field, at `[start, end)`. The field's value is at `[end, value_end)`."""

    start: int
    end: int
    value_end: int


class Selection(NamedTuple):
    """The fields that a `Selector` found, in wire order."""

    structs: list[tuple[Span, ...]]
    """One entry per struct at the path: the spans of the named fields in the order of the names.

    A span includes the field's length prefix."""
    tag_sizes: list[TagSize]
    """The sizes of the tagged fields on the path. They change when the length of a selected field changes."""


class _LimitedList(list[tuple[Span, ...]]):
    def __init__(self, max_structs: int) -> None:
        super().__init__()
        self._max_structs = max_structs

    def append(self, spans: tuple[Span, ...]) -> None:
        check_items(len(self) + 1, self._max_structs)
        super().append(spans)


_Visit = Callable[[Buffer, int, Selection], Steps[int]]


Selector = Stepped[..., Selection]
"""Finds the named fields of every struct at one path; compiled by `MessagePlan.selector`."""


class MessagePlan:
    """The compiled schema of one message in one version."""

    __slots__ = ("_root", "schema", "skip", "version")

    def __init__(self, schema: MessageSchema, version: int) -> None:
        if version not in schema.valid_versions:
            raise ProtocolError(f"{schema.name} has no version {version}")
        self.schema = schema
        self.version = version
        self._root = _compile_struct(schema.fields, version, version in schema.flexible_versions)
        self.skip = Stepped(self._skip)

    @property
    def is_flexible(self) -> bool:
        return self._root.flexible

    def _skip(self, buf: Buffer, pos: int) -> Steps[int]:
        """Returns the end of the message that begins at `pos`.

        The content of tagged fields is not checked, not even of known ones: each is skipped by its size.
        """
        return checked_end(buf, (yield from self._root.skip(buf, pos)))

    def walk(self, buf: Buffer, pos: int) -> list[FieldSpan]:
        """Returns the spans of the message that begins at `pos`, in wire order. Ignores bytes after its end.

        The spans take many times the memory of the message, so this is for messages of known size and for tests.
        """
        spans: list[FieldSpan] = []
        self._root.walk(buf, pos, (), spans)
        return spans

    def selector(self, path: tuple[str, ...], names: tuple[str, ...]) -> Selector:
        """Returns a selector for the fields `names` of every struct at `path`.

        The path `()` is the message itself. The selector visits each element of an array on the path. `names` must be
        in wire order. Raises `ValueError` when this version does not have all of these fields.
        """
        visit = _compile_visit(self._root, path, names, last=True)

        def select(buf: Buffer, pos: int, max_structs: int = sys.maxsize) -> Steps[Selection]:
            """Returns the selected fields of the message whose body begins at `pos`.

            The bytes after the last selected field are not checked. Stops with a `LimitExceededError` at the first
            struct above `max_structs`."""
            selection = Selection([] if max_structs == sys.maxsize else _LimitedList(max_structs), [])
            checked_end(buf, (yield from visit(buf, pos, selection)))
            return selection

        return Stepped(select)


def _compile_visit(struct: Struct, path: tuple[str, ...], names: tuple[str, ...], *, last: bool) -> _Visit:
    """When `last` is true, the visit may stop after the last selected field: the caller needs no end of the struct."""
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


def _visit_value(node: Shape, path: tuple[str, ...], names: tuple[str, ...], *, last: bool) -> _Visit:
    if isinstance(node, Struct):
        return _compile_visit(node, path, names, last=last)
    if isinstance(node, NullableStruct):
        visit_struct = _compile_visit(node.struct, path, names, last=last)

        def visit_nullable(buf: Buffer, pos: int, selection: Selection) -> Steps[int]:
            presence, pos = read_int8(buf, pos)
            return pos if presence < 0 else (yield from visit_struct(buf, pos, selection))

        return visit_nullable
    if isinstance(node, Array):
        visit_element = _visit_value(node.element, path, names, last=last)
        read_length = node.read_length

        def visit_array(buf: Buffer, pos: int, selection: Selection) -> Steps[int]:
            length, pos = read_length(buf, pos)
            for _ in range(length):
                pos = yield from visit_element(buf, pos, selection)
            return pos

        return visit_array
    raise ValueError(f"cannot select {names} from a primitive")


def _visit_leaf(struct: Struct, names: tuple[str, ...], *, last: bool) -> _Visit:
    present = [name for name, _ in struct.fields]
    if not names or [name for name in present if name in names] != list(names):
        raise ValueError(f"cannot select the fields {names} from a struct that has {present}")
    steps: list[tuple[int, Shape, bool]] = []
    size = 0
    for name, node in struct.fields:
        if name not in names and node.fixed_size is not None:
            size += node.fixed_size
            continue
        steps.append((size, node, name in names))
        size = 0
        if last and name == names[-1]:
            break
    tail = 0 if last else size
    has_tags = struct.flexible and not last

    def visit(buf: Buffer, pos: int, selection: Selection) -> Steps[int]:
        spans: list[Span] = []
        for before, node, selected in steps:
            pos += before
            end = (yield from node.skip(buf, pos)) if node.end is None else node.end(buf, pos)
            if selected:
                spans.append(Span(pos, end))
            pos = end
        pos += tail
        # Each struct is checked here. Otherwise an array of fixed-size structs could yield more than the buffer holds.
        selection.structs.append(tuple(spans))
        yield
        return (yield from skip_tags(buf, pos)) if has_tags else checked_end(buf, pos)

    return visit


def _visit_field(struct: Struct, position: int, inner: _Visit, *, last: bool) -> _Visit:
    before, before_tail = merge_fixed(node for _, node in struct.fields[:position])
    after, after_tail = merge_fixed(node for _, node in struct.fields[position + 1 :])
    flexible = struct.flexible

    def visit(buf: Buffer, pos: int, selection: Selection) -> Steps[int]:
        pos = yield from skip_fields(before, before_tail, buf, pos)
        pos = yield from inner(buf, pos, selection)
        if last:
            return pos
        pos = yield from skip_fields(after, after_tail, buf, pos)
        return (yield from skip_tags(buf, pos)) if flexible else pos

    return visit


def _visit_tagged(struct: Struct, wanted: int, inner: _Visit) -> _Visit:
    fields, tail = merge_fixed(node for _, node in struct.fields)

    def visit(buf: Buffer, pos: int, selection: Selection) -> Steps[int]:
        pos = yield from skip_fields(fields, tail, buf, pos)
        count, pos = read_tag_count(buf, pos)
        first = pos
        for _ in range(count):
            tag, size_at, start, end = read_tag(buf, pos)
            if tag == wanted:
                if selection.tag_sizes and selection.tag_sizes[-1].start >= first:
                    raise ProtocolError(f"tag {tag} occurs twice in one tagged section")
                selection.tag_sizes.append(TagSize(size_at, start, end))
                if (yield from inner(buf, start, selection)) != end:
                    raise ProtocolError(f"tagged field {tag} at {start} does not have the size that its tag announces")
            pos = end
            yield
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


def _compile_struct(fields: tuple[FieldSchema, ...], version: int, flexible: bool) -> Struct:
    plain: list[tuple[str, Shape]] = []
    tagged: dict[int, tuple[str, Shape]] = {}
    for field in fields:
        if version not in field.versions:
            continue
        entry = field.name, _compile_field(field, version, flexible)
        if field.tag is not None and version in field.tagged_versions:
            tagged[field.tag] = entry
        else:
            plain.append(entry)
    return Struct(plain, tagged, flexible)


def _compile_field(field: FieldSchema, version: int, flexible: bool) -> Shape:
    compact = flexible if field.flexible_versions is None else version in field.flexible_versions
    nullable = version in field.nullable_versions
    if field.is_array:
        return Array(_compile_value(field, version, compact, nullable=False), compact, nullable)
    return _compile_value(field, version, compact, nullable=nullable)


def _compile_value(field: FieldSchema, version: int, compact: bool, *, nullable: bool) -> Shape:
    name = field.element_type
    if name in _FIXED_SIZES:
        return Fixed(_FIXED_SIZES[name])
    if name == "string":
        return LengthPrefixed(read_string_bounds, compact, nullable)
    if name in ("bytes", "records"):
        return LengthPrefixed(read_bytes_bounds, compact, nullable)
    struct = _compile_struct(field.fields, version, compact)
    return NullableStruct(struct) if nullable else struct


@cache
def compile_schema(name: str, version: int) -> MessagePlan:
    """Returns the plan of the schema with that name, also for schemas that are no API message.

    Raises `ProtocolError` when there is no such schema, or when the schema does not have that version.
    """
    return MessagePlan(load_schema(name), version)


@cache
def compile_message(api_key: int, version: int, kind: MessageKind) -> MessagePlan:
    """Returns the plan of an API message. Raises `ProtocolError` when that API or version has no schema."""
    return compile_schema(message_name(api_key, kind), version)
