"""Offload by Spark itself: by the command, and on executors and drivers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from tests.pipeline.test_offload_on_kafka import check_all_is_remote_once, filled
from tests.servers.kafka import KafkaCluster

pytestmark = pytest.mark.integration
WORK = Path(pyspark.__file__).parent / "work"
"""Where Spark's own cluster writes, whatever it is told."""


@contextmanager
def killed_offload(config: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    before = set(WORK.iterdir()) if WORK.exists() else set()
    command = [sys.executable, "-m", "tests.pipeline.killed_offload", str(config), str(folder)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for made in set(WORK.iterdir()) - before if WORK.exists() else ():
            shutil.rmtree(made, ignore_errors=True)


def wait_for(file: Path, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 240
    while not file.exists():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


@pytest.mark.timeout(400)
def test_an_executor_and_then_the_driver_are_killed_and_nothing_is_copied_twice_or_left(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    rig = filled(kafka_of_three, tmp_path, topic_name, partitions=2)
    config, folder = tmp_path / "config.toml", tmp_path / "run"
    config.write_text(rig.text)
    folder.mkdir()
    with killed_offload(config, folder) as process:
        wait_for(folder / "under-way", process, folder / "output")
        assert (folder / "executor-killed").exists()
        process.kill()
        process.wait()
        committed = [rig.look(partition) for partition in (0, 1)]
        assert all(looked.segments for looked in committed)
        assert any(looked.unfinished for looked in committed)
        report = rig.offload()
    assert report.troubles == []
    check_all_is_remote_once(rig, 0, 1)
    for partition, before in enumerate(committed):
        assert rig.look(partition).segments[: len(before.segments)] == before.segments


@pytest.mark.usefixtures("spark")
def test_the_command_shows_a_plan_and_then_what_was_copied(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    rig = filled(kafka_of_three, tmp_path, topic_name, partitions=2)
    config = tmp_path / "config.toml"
    config.write_text(rig.text)
    arguments = ["offload", "--config", str(config), "--max-age", "0", "--max-mbps-per-broker", "100", "--json"]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert [(one["first_offset"], one["next_offset"]) for one in json.loads(planned.stdout)] == [(0, 200), (0, 200)]
    assert rig.objects() == []
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [one["next_offset"] for one in json.loads(done.stdout)["partitions"]] == [200, 200]
    check_all_is_remote_once(rig, 0, 1)
