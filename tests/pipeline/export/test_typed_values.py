"""Values by a schema: a value that fits is typed.

Any other becomes a dead letter with its error. No value is dropped.
"""

from __future__ import annotations

import json
import pickle
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from fastavro import parse_schema, schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decode.record_columns import KAFKA_COLUMNS
from pipeline.export.schema_error import ValueSchemaError
from pipeline.export.typed_values import DEAD_LETTER, TypedValues, read_value_schema

ORDER = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "order",
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": ["number", "null"]},
        "state": {"type": "string", "enum": ["new", "paid"]},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}}},
        "gift": {"type": "boolean"},
    },
    "required": ["id"],
}
AVRO_ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "key", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "before", "type": ["null", "State"]},
        {"name": "next", "type": ["null", "shop.State"]},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {"name": "lines", "type": {"type": "array", "items": "string"}},
    ],
}
FULL = {
    "id": 7,
    "note": None,
    "price": Decimal("12.50"),
    "at": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
    "key": UUID("12345678-9abc-def0-1234-56789abcdef0"),
    "state": "PAID",
    "before": "NEW",
    "next": None,
    "counts": {"a": 1},
    "lines": ["x", "y"],
}


def batch_of(values: list[bytes | None]) -> pa.RecordBatch:
    rows = len(values)
    columns: dict[str, list[Any]] = {
        "key": [b"k"] * rows,
        "value": values,
        "topic": ["orders"] * rows,
        "partition": [0] * rows,
        "offset": list(range(rows)),
        "timestamp": [0] * rows,
        "timestampType": [0] * rows,
    }
    return pa.RecordBatch.from_pydict(columns, schema=KAFKA_COLUMNS.schema)


def read(values: TypedValues, *raw: bytes | None) -> tuple[list[Any], list[Any]]:
    typed, dead = values.typed(batch_of(list(raw)))
    typed.validate(full=True)
    assert typed.schema == values.schema(KAFKA_COLUMNS.schema)
    assert typed.column("offset").to_pylist() == list(range(len(raw)))
    letters = typed.column("dead_letter").to_pylist()
    assert dead == sum(letter is not None for letter in letters)
    return typed.column("value").to_pylist(), letters


def avro(schema: object, value: object) -> bytes:
    data = BytesIO()
    schemaless_writer(data, parse_schema(schema), value)  # type: ignore[arg-type]  # a schema is any JSON
    return data.getvalue()


def test_json_values_become_columns() -> None:
    whole = {
        "id": 1,
        "price": 2.5,
        "state": "paid",
        "at": "2024-05-06T09:08:09+02:00",
        "day": "2024-05-06",
        "lines": [{"sku": "a"}, {"sku": "b", "more": 1}],
        "gift": True,
        "unknown": [1],
    }
    values, letters = read(TypedValues("json", json.dumps(ORDER)), json.dumps(whole).encode(), b'{"id": 2.0}', None)
    none = dict.fromkeys(ORDER["properties"])
    assert values == [
        {
            **{name: whole[name] for name in ("id", "price", "state", "gift")},
            "at": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
            "day": date(2024, 5, 6),
            "lines": [{"sku": "a"}, {"sku": "b"}],
        },
        {**none, "id": 2},
        None,
    ]
    assert letters == [None, None, None]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"", "Expecting value"),
        (b"[1]", "expected an object"),
        (b"{}", "id is missing"),
        (b'{"id": true}', "id: expected an integer"),
        (b'{"id": 9223372036854775808}', "id: expected an integer of 64 bits"),
        (b'{"id": 1, "price": NaN}', "NaN is not JSON"),
        (b'{"id": 1, "price": 1e999}', "price: a number that is too large"),
        (b'{"id": 1, "state": "lost"}', 'state: "lost" is not one of'),
        (b'{"id": 1, "lines": [{"sku": "a"}, {"sku": 5}]}', "lines[1].sku: expected a string"),
        (b'{"id": 1, "lines": [{"sku": "\\ud800"}]}', "lines[0].sku: expected text of Unicode"),
        (b'{"id": 1, "at": "0001-01-01T00:00:00+01:00"}', "at: expected date-time"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_value_outside_the_schema_is_a_dead_letter(value: bytes, error: str) -> None:
    values, letters = read(TypedValues("json", json.dumps(ORDER)), b'{"id": 1}', value, b'{"id": 3}')
    assert [one and one["id"] for one in values] == [1, None, 3]
    assert letters[0] is letters[2] is None
    assert letters[1]["value"] == value
    assert error in letters[1]["error"]


def test_other_properties_can_be_forbidden() -> None:
    strict = TypedValues("json", json.dumps({**ORDER, "additionalProperties": False}))
    _, [letter] = read(strict, b'{"id": 1, "x\\ud800": 2}')
    assert letter["error"].endswith("x? is not expected")


def test_avro_values_become_columns() -> None:
    values, letters = read(TypedValues("avro", json.dumps(AVRO_ORDER)), avro(AVRO_ORDER, FULL))
    assert letters == [None]
    assert values == [{**FULL, "key": str(FULL["key"]), "counts": [("a", 1)]}]


def test_bytes_of_another_avro_schema_are_dead_letters() -> None:
    whole = avro(AVRO_ORDER, FULL)
    values, letters = read(TypedValues("avro", json.dumps(AVRO_ORDER)), whole + b"\0", whole[:-1], b"", whole)
    assert [one is None for one in values] == [True, True, True, False]
    assert letters[0] == {"value": whole + b"\0", "error": "1 bytes follow the value that the schema describes"}
    assert letters[1]["error"].startswith("does not fit the schema: ")
    assert letters[2]["error"].startswith("does not fit the schema: ")


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_confluents_prefix_names_the_schema(kind: str) -> None:
    schema, value = ('"long"', avro("long", 5)) if kind == "avro" else ('{"type": "integer"}', b"5")
    raw = [b"\0\0\0\0\x07" + value, b"\0\0\0\0\x08" + value, value, b""]
    values, letters = read(TypedValues(kind, schema, confluent_id=7), *raw)
    assert values == [5, None, None, None]
    no_prefix = "the prefix of Confluent's wire format is missing"
    assert [letter and letter["error"] for letter in letters] == [
        None,
        "written with the schema 8, not 7",
        no_prefix,
        no_prefix,
    ]


def test_a_value_that_arrow_refuses_is_a_dead_letter_of_its_own() -> None:
    """A decimal that has more digits than its schema says."""
    schema = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
    raw = [b"\x64", avro("bytes", (99_999_999).to_bytes(4)), avro("bytes", (1234).to_bytes(2))]
    values, letters = read(TypedValues("avro", json.dumps(schema)), raw[1], raw[2])
    assert values == [None, Decimal("12.34")]
    assert letters[0]["value"] == raw[1]


@given(st.lists(st.binary(max_size=40) | st.none(), max_size=20), st.sampled_from(["json", "avro"]))
def test_every_record_is_a_value_or_a_dead_letter(raw: list[bytes | None], kind: str) -> None:
    schema = ORDER if kind == "json" else AVRO_ORDER
    values, letters = read(TypedValues(kind, json.dumps(schema)), *raw)
    for value, letter, given_value in zip(values, letters, raw, strict=True):
        assert value is None or letter is None
        assert letter is None if given_value is None else value is not None or letter["value"] == given_value


@pytest.mark.parametrize(
    ("kind", "schema", "error"),
    [
        ("json", {"$ref": "#/x"}, r"\$ref is not supported"),
        ("json", {"type": ["string", "integer"]}, "expected one type"),
        ("json", {"type": "object", "properties": {"a": {"type": "decimal"}}}, "a: unknown type 'decimal'"),
        ("json", {"type": "object", "properties": {"a": {"type": "array"}}}, r"a\[\]: expected a schema"),
        ("json", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}, "b is required"),
        ("json", {"type": "string", "minLength": 1}, "minLength is not supported"),
        ("json", {"type": "object", "properties": ["a"]}, "not a JSON Schema"),
        ("json", {"type": "integer", "enum": 5}, "not a JSON Schema"),
        ("avro", ["null", "string", "int"], "a union of null and one other type"),
        ("avro", "strange", "not an Avro schema"),
        ("avro", {"type": "record", "name": "R", "fields": []}, "without fields"),
        (
            "avro",
            {"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "R"]}]},
            "R is within itself",
        ),
        ("avro", {"type": "bytes", "logicalType": "decimal", "precision": 40}, "at most 38 digits"),
        ("avro", {"type": "bytes", "logicalType": "decimal"}, "a decimal has a precision"),
    ],
)
def test_a_schema_that_is_no_column_is_refused(kind: str, schema: object, error: str, tmp_path: Path) -> None:
    """A JSON Schema beyond the subset, or an Avro schema."""
    file = tmp_path / "schema"
    file.write_text(json.dumps(schema))
    with pytest.raises(ValueSchemaError, match=error):
        read_value_schema(f"{kind}:{file}")


def test_a_schema_is_named_by_its_kind_and_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueSchemaError, match=r"expected json:FILE or avro:FILE, not 'schema.json'"):
        read_value_schema("schema.json")
    for path, said in (("nowhere.json", "No such file or directory"), (str(tmp_path), "Is a directory")):
        with pytest.raises(ValueSchemaError) as raised:
            read_value_schema(f"avro:{path}")
        assert str(raised.value) == f"{path}: {said}"
    for broken in (b"{", b"\xff\xfe{"):
        (tmp_path / "broken.json").write_bytes(broken)
        with pytest.raises(ValueSchemaError, match="not JSON"):
            read_value_schema(f"json:{tmp_path / 'broken.json'}")
    (tmp_path / "order.json").write_text(json.dumps(ORDER))
    values = pickle.loads(pickle.dumps(read_value_schema(f"json:{tmp_path / 'order.json'}")))
    assert values.schema(KAFKA_COLUMNS.schema).field("dead_letter").type == DEAD_LETTER


def test_no_depth_of_a_value_ends_the_job() -> None:
    """Also where it can just be read, and not be written into the error any more."""
    values = [b"[" * depth + b"]" * depth for depth in range(1, sys.getrecursionlimit())]
    _, letters = read(TypedValues("json", json.dumps(ORDER)), *values)
    assert [letter["value"] for letter in letters] == values
