"""One Spark session for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from pipeline.session import spark_session
from tests.pipeline.read_stage import ReadStage, read_stage
from tests.servers.kafka import KafkaCluster
from tests.servers.spark import QUICK_JAVA, unpacked_spark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One after the other, the first of the server that they share: idle for a minute, Spark's Python workers end, and
    the next ones import everything anew."""
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """`local[2]` in this process."""
    with pytest.MonkeyPatch.context() as patch:  # the JVM keeps it
        patch.setenv("SPARK_HOME", str(unpacked_spark(tmp_path_factory.mktemp("spark"))))
        session = spark_session("local[2]", {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": QUICK_JAVA})
    yield session
    session.stop()


@pytest.fixture(scope="session")
def stage(kafka_of_three: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadStage]:
    """A topic of both tiers; tests that add to it leave it longer than it was."""
    with read_stage(kafka_of_three, tmp_path_factory.mktemp("stage"), f"orders-{uuid.uuid4().hex[:8]}") as stage:
        yield stage
