"""One Spark session for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from functools import partial

import pytest
from pyspark.sql import SparkSession

from pipeline.spark import progress
from pipeline.spark.session import spark_session
from tests.support.pipeline.offload_rig import CLAIM_TIMEOUT_MS
from tests.support.pipeline.read_stage import ReadStage, read_stage
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.spark import QUICK_JAVA, unpacked_spark
from tiers.access.open_tier import owned_tier


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One after the other, the first of the server that they share: idle for a minute, Spark's Python workers end, and
    the next ones import everything anew."""
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """`local[2]` in this process."""
    with pytest.MonkeyPatch.context() as patch:  # the JVM keeps it
        patch.setenv("SPARK_HOME", str(unpacked_spark(tmp_path_factory.mktemp("spark"))))
        conf = {
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.network.timeout": "600s",  # what says nothing for two minutes may only be late
        }
        session = spark_session("local[2]", conf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "STALLED_POLLS", sys.maxsize)  # nor is it a cluster without executors
        yield session
    session.stop()


@pytest.fixture(scope="module", autouse=True)
def patient_tier() -> Iterator[None]:
    """A busy machine opens a tier in its own time: that an opening is given up only ends a hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiers.access.open_tier.TIMEOUT_MS", 180_000)
        yield


@pytest.fixture(autouse=True)
def targets_of_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest deletes the folder of a test, and gives its name to another test. An open target would miss its folder."""
    monkeypatch.setattr("pipeline.export.target._open", {})


@pytest.fixture
def patient_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a job's metadata partitions may be slow to give them up."""
    for job in ("merge", "rebuild"):
        monkeypatch.setattr(f"pipeline.maintenance.{job}.owned_tier", partial(owned_tier, timeout_ms=CLAIM_TIMEOUT_MS))


@pytest.fixture(scope="session")
def stage(kafka_of_three: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadStage]:
    """A topic of both tiers; tests that add to it leave it longer than it was."""
    with read_stage(kafka_of_three, tmp_path_factory.mktemp("stage"), f"orders-{uuid.uuid4().hex[:8]}") as stage:
        yield stage
