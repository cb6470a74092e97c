"""By spark-submit, on a cluster of two workers whose Python has the libraries and no Tidegate: what a real Kafka has is
copied and read, also when an executor is slow or dies, and when the driver does.

One application for all of it: each starts three Java processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import cli
from tests.support.pipeline import submitted_offload
from tests.support.pipeline.offload_rig import OffloadRig, check_all_is_remote_once, offload_rig
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.spark import QUICK_JAVA, SPARK_SUBMIT, SparkMaster, spark_workers

PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
LIBRARIES = sysconfig.get_path("purelib")
"""As a path: no .pth file is read there, so that the installed Tidegate is not found."""
BARE = {"PYSPARK_PYTHON": str(PYTHON), "PYTHONPATH": LIBRARIES}
CONF = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.network.timeout": "600s",
    "spark.python.task.killTimeout": "200ms",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
}
"""What Spark takes for dead may only be late; and what it ends writes nothing any more when the job commits."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    assert cli.run(["package", str(folder)]) == 0
    return folder


def test_every_command_runs_from_the_zip(package: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{package / 'tidegate.zip'}:{LIBRARIES}"}
    command: list[str | Path] = [PYTHON, package / "tidegate_pipeline.py", "usage", "--config", "/nowhere.toml"]
    ended = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
    assert ended.stderr == "tidegate-pipeline: /nowhere.toml: No such file or directory\n"
    assert ended.returncode == 2


@dataclass(frozen=True)
class Application:
    process: subprocess.Popen[bytes]
    output: Path

    def wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + 900
        while not file.exists():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """The driver and its JVM."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def submitted(master: str, archive: Path, folder: Path, arguments: list[str | Path]) -> Iterator[Application]:
    command: list[str | Path] = [SPARK_SUBMIT, "--master", master, "--driver-java-options", QUICK_JAVA]
    for key, value in {**CONF, "spark.executor.extraJavaOptions": QUICK_JAVA}.items():
        command += ["--conf", f"{key}={value}"]
    command += ["--py-files", archive, submitted_offload.__file__, *arguments]
    environment = {**os.environ, **BARE, "SPARK_LOCAL_IP": "127.0.0.1"}
    output = folder / "output"
    with output.open("wb") as said:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=said, stderr=said, start_new_session=True
        )
    application = Application(process, output)
    try:
        yield application
    finally:
        application.kill()


@dataclass(frozen=True)
class Filled:
    """Two partitions of four tiles or so."""

    rig: OffloadRig
    values: dict[int, list[bytes]]

    @property
    def config(self) -> Path:
        return self.rig.folder / "config.toml"


def filled(kafka: KafkaCluster, folder: Path, topic: str) -> Filled:
    folder.mkdir()
    create_topic(kafka.bootstrap_servers, topic, partitions=2)
    values = {partition: random_values(200) for partition in (0, 1)}
    for partition, produced in values.items():
        produce(kafka.bootstrap_servers, topic, produced, partition=partition)
    one = Filled(offload_rig(kafka, folder, topic), values)
    one.config.write_text(one.rig.text)
    return one


def names_of(objects: list[str], segments: str) -> list[str]:
    assert segments
    return [name for name in objects if any(one in name for one in segments.split())]


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_slow_and_dead_executors_and_drivers_cost_only_time(
    kafka_of_three: KafkaCluster, package: Path, topic_name: str, tmp_path: Path
) -> None:
    first = filled(kafka_of_three, tmp_path / "first", f"{topic_name}-1")
    second = filled(kafka_of_three, tmp_path / "second", f"{topic_name}-2")
    arguments = [each for one in (first, second) for each in (one.config, one.rig.folder)]
    with SparkMaster() as master, spark_workers(master, ["127.0.0.1", "127.0.0.2"], BARE):
        # Two addresses are two machines to Spark: what is slow on one it does once more on the other alone.
        archive = package / "tidegate.zip"
        with submitted(master.url, archive, tmp_path, [first.rig.topic, *arguments]) as application:
            application.wait_for(first.rig.folder / "said")
            check_the_quicker_attempt_counted(first, master.url)
            application.wait_for(second.rig.folder / "under-way")
            application.kill()
            check_the_next_driver_goes_on(second)


def check_the_quicker_attempt_counted(filled: Filled, master: str) -> None:
    rig = filled.rig
    assert json.loads((rig.folder / "said").read_text()) == {
        "master": master,
        "troubles": [],
        "waves": 1,
        "segments": len(rig.objects()) // 2,
        "values": {str(each): hashlib.sha256(b"".join(of)).hexdigest() for each, of in filled.values.items()},
        "schema": "ShareFetchResponse",
        "stores": ["arrow", "hdfs", "local", "s3"],
    }
    assert names_of(rig.objects(), (rig.folder / "slow").read_text()) == []
    assert not (rig.folder / "came-to-its-end").exists()
    check_all_is_remote_once(rig, 0, 1)


def check_the_next_driver_goes_on(filled: Filled) -> None:
    """The killed executor leaves nothing. The killed driver leaves nothing without a name."""
    rig = filled.rig
    assert names_of(rig.objects(), (rig.folder / "executor-killed").read_text()) == []
    committed = [rig.look(partition) for partition in (0, 1)]
    assert all(looked.segments for looked in committed)
    assert len(rig.objects()) > 2 * sum(len(looked.segments) for looked in committed)
    assert rig.unnamed(0, 1) == []
    assert rig.offload().troubles == []
    check_all_is_remote_once(rig, 0, 1)
    for partition, before in enumerate(committed):
        assert rig.look(partition).segments[: len(before.segments)] == before.segments
