"""The commands of jobs on Spark, and a service that ends by a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from pipeline.cli import app
from tests.support.pipeline.offload_rig import OffloadRig, check_all_is_remote_once, filled, offload_rig
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TIMEOUT_S, create_topic, produce, produce_transaction, random_values
from tests.support.servers.spark import QUICK_JAVA
from tiers.metadata.topic.settings import metadata_group_id

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("spark")
def test_offload_copies_and_scrub_finds_planted_faults(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    rig = filled(kafka_of_three, tmp_path, topic_name, partitions=2)
    config = tmp_path / "config.toml"
    config.write_text(rig.text)

    def command(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--config", str(config), "--json"])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    runner = ["--master", "local[2]"]
    offload = ["offload", "--max-age", "0s", "--max-mbps-per-broker", "100"]
    planned = command(*offload, "--dry-run")
    assert [(one["first_offset"], one["next_offset"]) for one in planned] == [(0, 200), (0, 200)]
    assert rig.objects() == []
    assert [one["next_offset"] for one in command(*offload, *runner)["partitions"]] == [200, 200]
    check_all_is_remote_once(rig, 0, 1)

    whole = command("scrub", "--level", "deep", *runner)
    assert (whole["findings"], whole["records"]) == ([], 400)
    damaged, other, *_ = sorted((tmp_path / "remote").rglob("*.log"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:1000] + bytes((content[1000] ^ 1,)) + content[1001:])
    orphan = other.with_name(f"{other.name[:42]}{uuid4()}.log")
    orphan.write_bytes(b"nobody's")
    found = command("scrub", "--grace", "0s", *runner, code=1)["findings"]
    expected = [("damaged", damaged.stem[42:]), ("orphan", orphan.stem[42:])]
    assert sorted((each["kind"], each["segment"]) for each in found) == expected
    delete = ["scrub", "--level", "meta", "--grace", "0s", "--delete-orphans", *runner]
    command(*delete, code=1)
    assert orphan.exists()
    assert command(*delete, "--apply")["deleted_segments"] == 1
    assert not orphan.exists()


def test_with_an_interval_it_runs_until_it_is_ended_and_completes_its_work(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    bootstrap = kafka_of_three.bootstrap_servers
    rig = offload_rig(kafka_of_three, tmp_path, topic_name)
    config, output = tmp_path / "config.toml", tmp_path / "output"
    config.write_text(rig.text)
    command = [sys.executable, "-m", "pipeline", "offload", "--config", str(config), "--max-age", "0s"]
    slowly = ["--interval", "500ms", "--max-mbps-per-broker", "0.05"]
    spark = ["--master", "local[1]", "--conf", f"spark.driver.extraJavaOptions={QUICK_JAVA}"]
    with output.open("wb") as said, subprocess.Popen([*command, *slowly, *spark], stdout=said, stderr=said) as process:
        try:
            until(lambda: "no tiered topic" in output.read_text() or process.poll() is not None)
            assert process.poll() is None, output.read_text()
            create_topic(bootstrap, topic_name)
            for produced in (60, 120):
                produce(bootstrap, topic_name, random_values(60))
                until_copied(rig, 1000 * produced)
            before = rig.objects()
            # All at once, hence in one round, and that takes most of a minute.
            produce_transaction(bootstrap, topic_name, random_values(480), transactional_id=topic_name, commit=True)
            until(lambda: len(rig.objects()) > len(before))
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0, output.read_text()
            group = metadata_group_id(rig.config.remote_log.metadata_topic)
            admin = AdminClient({"bootstrap.servers": bootstrap})
            assert admin.describe_consumer_groups([group])[group].result(TIMEOUT_S).members == []
        finally:
            process.kill()
    assert output.read_text().splitlines()[-1] == "offload: ended"
    assert set(before) <= set(rig.objects())
    assert rig.unnamed() == []
    assert rig.offload().troubles == []
    check_all_is_remote_once(rig)


def until_copied(rig: OffloadRig, value_bytes: int) -> None:
    """A look at what counts takes long: first there are objects of so many bytes."""
    until(lambda: stored_bytes(rig) > value_bytes)
    until(lambda: is_copied(rig))


def stored_bytes(rig: OffloadRig) -> int:
    """The objects of logs. Objects of an attempt may be deleted during the listing."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in (rig.folder / "remote").rglob("*.log"))
    return 0


def is_copied(rig: OffloadRig) -> bool:
    looked = rig.look()
    return looked.remote_bytes == looked.log_bytes
