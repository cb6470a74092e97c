"""Random messages of any API and version by Kafka's schema, unknown tagged fields included: walkers are held to them.

A message comes as bytes and as a tree of plain values: structs are dicts by field name; a tagged field that was left
out is missing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import strategies as st

from protocol.message_schema import FieldSchema, load_schema
from protocol.primitives import write_array_length, write_bytes_length, write_string, write_uvarint

Tree = dict[str, Any]
Overrides = Mapping[str, st.SearchStrategy[Any]]

RECORDS = st.none() | st.sampled_from([0, 1, 126, 127, 128, 300, 16_383]).map(bytes) | st.binary(max_size=60)
"""Contents of a records field, with sizes on both sides of where its length takes one more byte."""

_UUIDS = st.binary(min_size=16, max_size=16).map(lambda raw: UUID(bytes=raw))
_INTEGERS = {"int8": (">b", 8), "int16": (">h", 16), "int32": (">i", 32), "int64": (">q", 64)}
_UNKNOWN_TAGS = st.dictionaries(st.integers(20, 40_000), st.binary(max_size=12), max_size=2)


class Message(NamedTuple):
    payload: bytes
    tree: Tree


@st.composite
def messages(
    draw: st.DrawFn, name: str, version: int, overrides: Overrides | None = None, unknown_tags: bool = True
) -> Message:
    """`name` as in the schema, `FetchResponse` say; `overrides` are strategies by field name."""
    schema = load_schema(name)
    writer = _Writer(draw, version, overrides or {}, unknown_tags)
    tree: Tree = {}
    return Message(writer.write_struct(schema.fields, version in schema.flexible_versions, tree), tree)


class _Writer:
    def __init__(self, draw: st.DrawFn, version: int, overrides: Overrides, unknown_tags: bool) -> None:
        self._draw = draw
        self._version = version
        self._overrides = overrides
        self._unknown_tags = unknown_tags

    def write_struct(self, fields: tuple[FieldSchema, ...], flexible: bool, tree: Tree) -> bytes:
        out = bytearray()
        tagged: dict[int, bytes] = {}
        for field in fields:
            if self._version not in field.versions:
                continue
            if field.tag is None or self._version not in field.tagged_versions:
                tree[field.name], encoded = self._write_field(field, flexible)
                out += encoded
            elif self._draw(st.booleans()):
                tree[field.name], tagged[field.tag] = self._write_field(field, flexible)
        if flexible:
            if self._unknown_tags and self._draw(st.integers(0, 4)) == 0:
                tagged |= self._draw(_UNKNOWN_TAGS)
            out += write_uvarint(len(tagged))
            for tag in sorted(tagged):
                out += write_uvarint(tag) + write_uvarint(len(tagged[tag])) + tagged[tag]
        return bytes(out)

    def _write_field(self, field: FieldSchema, compact: bool) -> tuple[Any, bytes]:
        nullable = self._version in field.nullable_versions
        if not field.is_array:
            return self._write_value(field, compact, nullable)
        if nullable and self._draw(st.booleans()):
            return None, b"\x00" if compact else b"\xff\xff\xff\xff"
        count = self._draw(self._overrides.get("[]" + field.name, st.integers(0, 3)))
        values = [self._write_value(field, compact, nullable=False) for _ in range(count)]
        return [value for value, _ in values], write_array_length(count, compact) + b"".join(raw for _, raw in values)

    def _write_value(self, field: FieldSchema, compact: bool, nullable: bool) -> tuple[Any, bytes]:
        kind = field.element_type
        if field.fields:
            tree: Tree = {}
            return tree, self.write_struct(field.fields, compact, tree)
        if kind in _INTEGERS:
            layout, bits = _INTEGERS[kind]
            number = self._value(field, st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), nullable=False)
            return number, struct.pack(layout, number)
        if kind == "bool":
            flag = self._value(field, st.booleans(), nullable=False)
            return flag, bytes((flag,))
        if kind == "uuid":
            uuid: UUID = self._value(field, _UUIDS, nullable=False)
            return uuid, uuid.bytes
        if kind == "string":
            text = self._value(field, st.text(max_size=10), nullable)
            return text, write_string(text, compact)
        if kind in ("bytes", "records"):
            raw = self._value(field, st.binary(max_size=150), nullable)
            if raw is None:
                return None, b"\x00" if compact else b"\xff\xff\xff\xff"
            return raw, write_bytes_length(len(raw), compact) + raw
        raise NotImplementedError(kind)

    def _value(self, field: FieldSchema, default: st.SearchStrategy[Any], nullable: bool) -> Any:
        strategy = self._overrides.get(field.name)
        if strategy is None:
            strategy = st.none() | default if nullable else default
        return self._draw(strategy)
