"""The data source that a session has divides small reads among the session's cores."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from pyspark import cloudpickle
from pyspark.sql.types import StructType

from pipeline.source.datasource import KafkaTieredDataSource, register_data_sources
from pipeline.source.options import ReadOptions

SCHEMA = StructType().add("value", "binary")
OPTIONS = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "orders"}


def registered(cores: int) -> type[KafkaTieredDataSource]:
    """Returns the source as Spark's processes get it."""
    sources: list[Any] = []
    session: Any = SimpleNamespace(
        createDataFrame=lambda *given: None,
        dataSource=SimpleNamespace(register=sources.append),
        sparkContext=SimpleNamespace(defaultParallelism=cores),
    )
    register_data_sources(session)
    (source,) = (one for one in sources if one.name() == "kafka_tiered")
    made: type[KafkaTieredDataSource] = pickle.loads(cloudpickle.dumps(source))  # type: ignore[no-untyped-call]  # it has no types
    return made


def parallelism_of(reader: Any) -> int:
    options: ReadOptions = reader._options
    return options.parallelism


def test_a_read_knows_the_cores_of_its_session() -> None:
    for cores in (3, 8):
        source = registered(cores)(OPTIONS)
        assert parallelism_of(source.reader(SCHEMA)) == cores
        assert parallelism_of(source.streamReader(SCHEMA)) == cores


def test_a_given_size_of_tasks_counts_alone() -> None:
    source = registered(8)({**OPTIONS, "splitBytes": "1000000"})
    assert parallelism_of(source.reader(SCHEMA)) == 1
