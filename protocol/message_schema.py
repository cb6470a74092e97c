"""A reader of Kafka's own JSON message schemas; no other module reads them.

kafka-python ships copies of the schemas. `protocol/schemas` holds the schemas that kafka-python lacks, in the same
format. The project does not use kafka-python's codec, because it drops unknown tags when it encodes
(docs/semantics.md 1.2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from protocol.api_keys import ApiKey, VersionRange
from protocol.errors import ProtocolError

MessageKind = Literal["Request", "Response"]

_NO_VERSION = VersionRange(0, -1)
_COMMENT_LINE = re.compile(r"^\s*//.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FieldSchema:
    name: str
    type: str
    """The name of a primitive or of a struct; `[]` before the name makes it an array."""
    versions: VersionRange
    nullable_versions: VersionRange
    flexible_versions: VersionRange | None
    """Overrides the flexible versions of the message; only client ids use it."""
    tagged_versions: VersionRange
    tag: int | None
    fields: tuple[FieldSchema, ...]
    """The fields of the struct or of the array's elements; empty for primitives."""

    @property
    def is_array(self) -> bool:
        return self.type.startswith("[]")

    @property
    def element_type(self) -> str:
        return self.type.removeprefix("[]")


@dataclass(frozen=True, slots=True)
class MessageSchema:
    name: str
    api_key: int | None
    valid_versions: VersionRange
    flexible_versions: VersionRange
    fields: tuple[FieldSchema, ...]


def message_name(api_key: int, kind: MessageKind) -> str:
    """Returns the schema's name, such as `FetchResponse` for key 1. Raises `ProtocolError` for an unknown key."""
    try:
        key = ApiKey(api_key)
    except ValueError:
        raise ProtocolError(f"unknown API key {api_key}") from None
    return "".join(word.capitalize() for word in key.name.split("_")) + kind


@cache
def load_schema(name: str) -> MessageSchema:
    """Returns the schema with that name. Raises `ProtocolError` when there is none."""
    for folder in _schema_folders():
        path = folder / f"{name}.json"
        if path.is_file():
            return parse_schema(path.read_text("utf-8"))
    raise ProtocolError(f"no schema of {name}")


def _schema_folders() -> tuple[Traversable, ...]:
    # `find_spec` finds kafka-python without importing a whole Kafka client into every process.
    client = find_spec("kafka")
    if client is None or not client.submodule_search_locations:
        raise ModuleNotFoundError("kafka-python is not installed; install it for its message schemas", name="kafka")
    shipped = Path(client.submodule_search_locations[0]) / "protocol" / "schemas" / "resources"
    # The project's own schemas may lie in a zip, because Spark ships code as a zip.
    return files(__package__) / "schemas", shipped


def parse_schema(text: str) -> MessageSchema:
    """Parses a schema: JSON in which whole lines may be comments."""
    schema = json.loads(_COMMENT_LINE.sub("", text))
    common = {struct["name"]: struct["fields"] for struct in schema.get("commonStructs", ())}
    return MessageSchema(
        name=schema["name"],
        api_key=schema.get("apiKey"),
        valid_versions=_parse_versions(schema["validVersions"]),
        flexible_versions=_parse_versions(schema["flexibleVersions"]),
        fields=_parse_fields(schema["fields"], common),
    )


def _parse_fields(fields: list[Mapping[str, Any]], common: Mapping[str, Any]) -> tuple[FieldSchema, ...]:
    return tuple(
        FieldSchema(
            name=field["name"],
            type=field["type"],
            versions=_parse_versions(field["versions"]),
            nullable_versions=_parse_versions(field.get("nullableVersions", "none")),
            flexible_versions=_parse_versions(field["flexibleVersions"]) if "flexibleVersions" in field else None,
            tagged_versions=_parse_versions(field.get("taggedVersions", "none")),
            tag=field.get("tag"),
            fields=_parse_fields(field.get("fields") or common.get(field["type"].removeprefix("[]"), []), common),
        )
        for field in fields
    )


def _parse_versions(text: str) -> VersionRange:
    """Parses `none`, `3`, `3-7` or `3+`."""
    if text == "none":
        return _NO_VERSION
    if text.endswith("+"):
        return VersionRange(int(text[:-1]), 32767)
    first, _, last = text.partition("-")
    return VersionRange(int(first), int(last or first))
