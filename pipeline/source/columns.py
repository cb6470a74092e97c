"""The columns of `kafka_tiered` as Spark types: all columns of Spark's own Kafka source, or the chosen ones."""

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
    """Returns the Spark schema of the named columns. Raises `OptionError` for an unknown column."""
    try:
        return StructType([StructField(name, _TYPES[name]) for name in RecordColumns(tuple(names)).names])
    except ValueError as error:
        raise OptionError(str(error)) from None


def columns_of(schema: StructType) -> RecordColumns:
    """Returns the columns of a schema that a user gave. Raises `OptionError` for an unknown column or a wrong type."""
    expected = spark_schema(schema.names)
    for given, known in zip(schema.fields, expected.fields, strict=True):
        if given.dataType != known.dataType:
            what = f"{known.dataType.simpleString()}, not {given.dataType.simpleString()}"
            raise OptionError(f"the column {given.name} is {what}")
    return RecordColumns(tuple(schema.names))
