"""`RecordColumns`: which of the columns of Spark's Kafka source are wanted, and what Arrow calls them.

Types are those that Spark demands of a Python data source to the letter: binary with 32-bit offsets, timestamps in
microseconds UTC. `headers` is null for a record without any, as in Spark.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

MAX_ARROW_BYTES = 8 << 20
"""Of one Arrow batch, unless it is a single record."""

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
    """`names` in the order in which they come out. Raises `ValueError` for a name that there is not, or twice."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names) or not _TYPES.keys() >= set(self.names):
            raise ValueError(f"columns {', '.join(self.names) or 'none'}; there are {', '.join(_TYPES)}")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, _TYPES[name]) for name in self.names])


ALL_COLUMNS = RecordColumns(tuple(_TYPES))
KAFKA_COLUMNS = RecordColumns(tuple(name for name in _TYPES if name != "headers"))
"""What Spark's Kafka source gives unless it is asked for `includeHeaders`."""
