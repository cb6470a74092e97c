"""One Spark session for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from pipeline.session import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """`local[2]` in this process."""
    session = spark_session("local[2]", {"spark.driver.memory": "1g"})
    yield session
    session.stop()
