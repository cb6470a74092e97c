"""An encoder of any Kafka message that notes the position of each field, as an oracle for the schema walker.

It shares no code with `protocol`. kafka-python's own loader reads the schemas, and this module implements versions,
types and lengths a second time. Values are dicts by the schema's field names. In a flexible version, `UNKNOWN_TAGS` of
a struct holds tagged fields that no schema knows. A tagged field that is missing from its dict is not written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path as FilePath
from typing import Any, NamedTuple
from uuid import UUID

import kafka.protocol.schemas.resources
from hypothesis import strategies as st
from kafka.protocol.schemas import load_json

import protocol

UNKNOWN_TAGS = "unknown tags"

Path = tuple[str | int, ...]
Schema = Mapping[str, Any]
Value = dict[str, Any]
Overrides = Mapping[str, st.SearchStrategy[Any]]

_OWN_SCHEMAS = FilePath(protocol.__path__[0]) / "schemas"
_PACK = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float64": "d",
}
_LONG = "x" * 200
"""A string whose compact length takes two bytes."""


@cache
def message_names() -> tuple[str, ...]:
    shipped = FilePath(kafka.protocol.schemas.resources.__path__[0])
    files = [*shipped.glob("*.json"), *_OWN_SCHEMAS.glob("*.json")]
    return tuple(sorted(file.stem for file in files if file.stem.endswith(("Request", "Response"))))


@cache
def message_schema(name: str) -> Schema:
    own = _OWN_SCHEMAS / f"{name}.json"
    schema: Schema = json.loads(own.read_text()) if own.exists() else load_json(name)
    return schema


def versions_of(name: str) -> range:
    first, last = _bounds(message_schema(name)["validVersions"])
    return range(first, last + 1)


def is_flexible(name: str, version: int) -> bool:
    return _within(version, message_schema(name)["flexibleVersions"])


def _bounds(text: str) -> tuple[int, int]:
    if text == "none":
        return 0, -1
    if text[-1] == "+":
        return int(text[:-1]), 1 << 15
    numbers = text.split("-")
    return int(numbers[0]), int(numbers[-1])


def _within(version: int, text: str) -> bool:
    first, last = _bounds(text)
    return first <= version <= last


def _is_tagged(field_schema: Schema, version: int) -> bool:
    return "tag" in field_schema and _within(version, field_schema["taggedVersions"])


def _fields(fields: list[Schema], version: int) -> list[Schema]:
    return [entry for entry in fields if _within(version, entry["versions"])]


def struct_paths(name: str, version: int) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yields the path of every struct, and the names of its untagged fields."""

    def descend(fields: list[Schema], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        present = _fields(fields, version)
        yield path, tuple(entry["name"] for entry in present if not _is_tagged(entry, version))
        for entry in present:
            if "fields" in entry:
                yield from descend(entry["fields"], (*path, entry["name"]))

    return descend(message_schema(name)["fields"], ())


def smallest(name: str, version: int, **fields: Any) -> bytes:
    """Encodes a message in which only `fields` have values. The others are null, 0 or empty."""
    return bytes(encode(name, version, {**_no_values(message_schema(name)["fields"], version), **fields}).data)


def _no_values(fields: list[Schema], version: int) -> Value:
    untagged = [entry for entry in _fields(fields, version) if not _is_tagged(entry, version)]
    return {entry["name"]: _no_value(entry, version) for entry in untagged}


def _no_value(entry: Schema, version: int) -> Any:
    if entry["type"].startswith("[]"):
        return []
    if _within(version, entry.get("nullableVersions", "none")):
        return None
    if "fields" in entry:
        return _no_values(entry["fields"], version)
    return {"string": "", "bytes": b"", "uuid": UUID(int=0)}.get(entry["type"], 0)


@dataclass(slots=True)
class EncodedMessage:
    data: bytearray = field(default_factory=bytearray)
    spans: list[tuple[Path, str, int, int]] = field(default_factory=list)
    """The fields' spans. A span has the fields of `protocol.schema.FieldSpan`."""
    structs: list[tuple[tuple[str, ...], dict[str, tuple[int, int]]]] = field(default_factory=list)
    """The structs in wire order. For each: its path without indices, and the extent of each untagged field."""


def encode(name: str, version: int, value: Value) -> EncodedMessage:
    encoder = _Encoder(version, is_flexible(name, version))
    encoder.struct(message_schema(name)["fields"], value, ())
    return encoder.message


class _Encoder:
    def __init__(self, version: int, flexible: bool, message: EncodedMessage | None = None) -> None:
        self.version = version
        self.flexible = flexible
        self.message = message or EncodedMessage()

    def struct(self, fields: list[Schema], value: Value, path: Path) -> None:
        extents: dict[str, tuple[int, int]] = {}
        self.message.structs.append((tuple(part for part in path if isinstance(part, str)), extents))
        tagged: dict[int, Schema | bytes] = dict(value.get(UNKNOWN_TAGS, {}))
        for entry in _fields(fields, self.version):
            if not _is_tagged(entry, self.version):
                start = len(self.message.data)
                self.field(entry, value[entry["name"]], (*path, entry["name"]))
                extents[entry["name"]] = start, len(self.message.data)
            elif entry["name"] in value:
                tagged[entry["tag"]] = entry
        if self.flexible:
            self.span(path, "tag_count", _uvarint(len(tagged)))
            for tag, content in sorted(tagged.items(), key=lambda item: item[0]):
                self.tag(tag, content, value, path)

    def tag(self, tag: int, content: Schema | bytes, value: Value, path: Path) -> None:
        if isinstance(content, bytes):
            self.span((*path, tag), "unknown_tag", _uvarint(tag) + _uvarint(len(content)) + content)
            return
        name = content["name"]
        measured = _Encoder(self.version, self.flexible)
        measured.field(content, value[name], ())
        self.span((*path, name), "tag", _uvarint(tag) + _uvarint(len(measured.message.data)))
        self.field(content, value[name], (*path, name))

    def field(self, entry: Schema, value: Any, path: Path) -> None:
        type_name = entry["type"]
        if type_name.startswith("[]"):
            self.span(path, "length", self.count(-1 if value is None else len(value)))
            for index, element in enumerate(value or ()):
                self.value(entry, type_name[2:], element, (*path, index))
        elif "fields" in entry and _within(self.version, entry.get("nullableVersions", "none")):
            self.span(path, "length", b"\xff" if value is None else b"\x01")
            if value is not None:
                self.value(entry, type_name, value, path)
        else:
            self.value(entry, type_name, value, path)

    def value(self, entry: Schema, type_name: str, value: Any, path: Path) -> None:
        if "fields" in entry:
            self.struct(entry["fields"], value, path)
        elif type_name in _PACK:
            self.span(path, "value", struct.pack(">" + _PACK[type_name], value))
        elif type_name == "uuid":
            self.span(path, "value", value.bytes)
        else:
            raw = None if value is None else value.encode() if type_name == "string" else value
            length = -1 if raw is None else len(raw)
            classic = struct.pack(">h" if type_name == "string" else ">i", length)
            self.span(path, "value", (_uvarint(length + 1) if self.flexible else classic) + (raw or b""))

    def count(self, length: int) -> bytes:
        return _uvarint(length + 1) if self.flexible else struct.pack(">i", length)

    def span(self, path: Path, kind: str, data: bytes) -> None:
        start = len(self.message.data)
        self.message.data += data
        self.message.spans.append((path, kind, start, start + len(data)))


def _uvarint(value: int) -> bytes:
    out = []
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    return bytes([*out, value])


class Message(NamedTuple):
    payload: bytes
    tree: Value


def encoded_messages(
    name: str, version: int, overrides: Overrides | None = None, *, unknown_tags: bool = True
) -> st.SearchStrategy[Message]:
    """Generates the messages of `messages` with their bytes."""
    return messages(name, version, overrides, unknown_tags=unknown_tags).map(
        lambda value: Message(bytes(encode(name, version, value).data), value)
    )


def messages(
    name: str, version: int, overrides: Overrides | None = None, *, unknown_tags: bool = True
) -> st.SearchStrategy[Value]:
    """Generates any message of that version, with known tagged fields set or missing.

    `unknown_tags`: whether structs at every level may have unknown tags. `overrides` are strategies by field name. The
    key `[]` with the name is for the number of elements of an array.
    """
    if overrides is None:
        return _any_message(name, version, unknown_tags)
    return _message(name, version, overrides, unknown_tags)


@cache
def _any_message(name: str, version: int, unknown_tags: bool) -> st.SearchStrategy[Value]:
    return _message(name, version, {}, unknown_tags)


def _message(name: str, version: int, overrides: Overrides, unknown_tags: bool) -> st.SearchStrategy[Value]:
    return _Strategies(version, overrides, is_flexible(name, version) and unknown_tags).struct(
        message_schema(name)["fields"]
    )


class _Strategies(NamedTuple):
    version: int
    overrides: Overrides
    unknown_tags: bool

    def struct(self, fields: list[Schema]) -> st.SearchStrategy[Value]:
        present = _fields(fields, self.version)
        tagged = [entry for entry in present if _is_tagged(entry, self.version)]
        optional = {entry["name"]: self.field(entry) for entry in tagged}
        if self.unknown_tags:
            # A tag that another version knows never has another meaning, so it is not used as unknown tag.
            known = {entry["tag"] for entry in fields if "tag" in entry}
            tags = (st.integers(0, 200) | st.integers(201, 40_000)).filter(lambda tag: tag not in known)
            optional[UNKNOWN_TAGS] = st.dictionaries(tags, _TAG_CONTENTS, max_size=2)
        required = {entry["name"]: self.field(entry) for entry in present if not _is_tagged(entry, self.version)}
        return st.fixed_dictionaries(required, optional=optional)

    def field(self, entry: Schema) -> st.SearchStrategy[Any]:
        value = self.value(entry)
        if entry["type"].startswith("[]"):
            count = self.overrides.get("[]" + entry["name"])
            value = st.lists(value, max_size=2) if count is None else count.flatmap(partial(_lists_of, value))
        elif entry["name"] in self.overrides:
            return value
        return st.none() | value if _within(self.version, entry.get("nullableVersions", "none")) else value

    def value(self, entry: Schema) -> st.SearchStrategy[Any]:
        if entry["name"] in self.overrides:
            return self.overrides[entry["name"]]
        if "fields" in entry:
            return self.struct(entry["fields"])
        return _PRIMITIVES[entry["type"].removeprefix("[]")]


def _lists_of(value: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(value, min_size=count, max_size=count)


RECORDS = st.none() | st.sampled_from([0, 1, 126, 127, 128, 300, 16_383]).map(bytes) | st.binary(max_size=60)
"""Contents of a records field. The sizes include those at which the length begins to take one more byte."""

_TAG_CONTENTS = st.sampled_from([b"", b"\x00", b"abc", b"y" * 130]) | st.binary(max_size=12)

_PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
    # kafka-python reads the zero uuid as None.
    "uuid": st.builds(lambda number: UUID(int=number), st.integers(1, 2**128 - 1)),
    "string": st.sampled_from(["", "a", "tøpic", _LONG]) | st.text(max_size=10),
    "bytes": st.sampled_from([b"", b"\x00", b"bytes", _LONG.encode()]) | st.binary(max_size=150),
    "records": st.sampled_from([b"", b"\xff", b"records", _LONG.encode()]) | st.binary(max_size=150),
}
