"""The columns of `kafka_tiered` as types of Spark: those of its own Kafka source, or as many as are asked for."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.decode.record_columns import RecordColumns
from pipeline.source.options import OptionError

_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


def spark_schema(names: Iterable[str]) -> StructType:
    """Raises `OptionError` for a column that there is not."""
    try:
        return StructType([StructField(name, _TYPES[name]) for name in RecordColumns(tuple(names)).names])
    except ValueError as error:
        raise OptionError(str(error)) from None


def columns_of(schema: StructType) -> RecordColumns:
    """Of a schema that a user gave. Raises `OptionError` for a column that there is not, or of another type."""
    expected = spark_schema(schema.names)
    for given, known in zip(schema.fields, expected.fields, strict=True):
        if given.dataType != known.dataType:
            what = f"{known.dataType.simpleString()}, not {given.dataType.simpleString()}"
            raise OptionError(f"the column {given.name} is {what}")
    return RecordColumns(tuple(schema.names))
