"""`RecordColumns`: the wanted columns of Spark's Kafka source, with their Arrow types.

The types are exactly those that Spark requires of a Python data source: binary with 32-bit offsets, and timestamps in
microseconds UTC. `headers` is null for a record without headers, as in Spark.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

MAX_ARROW_BYTES = 8 << 20
"""Limit of one Arrow batch, unless the batch is a single record."""

HEADERS_TYPE = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": HEADERS_TYPE,
}


@dataclass(frozen=True)
class RecordColumns:
    """`names` are in the order of the result's columns. Raises `ValueError` for an unknown or repeated name."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names) or not _TYPES.keys() >= set(self.names):
            raise ValueError(f"columns {', '.join(self.names) or 'none'}; the columns are {', '.join(_TYPES)}")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, _TYPES[name]) for name in self.names])


ALL_COLUMNS = RecordColumns(tuple(_TYPES))
KAFKA_COLUMNS = RecordColumns(tuple(name for name in _TYPES if name != "headers"))
"""The columns that Spark's Kafka source returns without the option `includeHeaders`."""
