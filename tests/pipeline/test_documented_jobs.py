"""The commands and the Python of docs/pipeline.md, on topics of both tiers behind a real proxy.

The addresses, names and folders are those of this run.
"""

from __future__ import annotations

import os
import shlex
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.utils.config import Config
from pyspark.sql import SparkSession

from pipeline import cli
from tests.support.documents import blocks, shell_commands
from tests.support.pipeline.read_stage import FIRST_TIME_MS, ReadStage, read_stage
from tests.support.repository import ROOT
from tests.support.servers.kafka import KafkaCluster

pytestmark = pytest.mark.integration

PAGE = "docs/pipeline.md"
ORDER = '{"type": "object", "properties": {"id": {"type": "integer"}}}'


@pytest.mark.usefixtures("spark", "patient_claims")
def test_the_commands_of_the_page_succeed(
    kafka_of_three: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    (tmp_path / "order.json").write_text(ORDER)
    for name, value in {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": f"file://{tmp_path}/warehouse",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{name}", value)
    # pyiceberg reads the environment when it is imported, which an earlier test may have done
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    with read_stage(kafka_of_three, tmp_path, topic) as stage:
        commands = [each for each in shell_commands(ROOT / PAGE) if each.startswith("tidegate-pipeline ")]
        ending = [each for each in commands if "--interval" not in each]  # tests/pipeline/test_offload_in_spark.py
        assert ending
        for number, command in enumerate(ending):
            here = {
                "tidegate.toml": stage.options["config"],
                "orders": topic,
                "orders.*": f"{topic}.*",
                "s3://lake/orders": str(tmp_path / f"lake-{number}"),  # an export continues an earlier one
                "json:order.json": f"json:{tmp_path / 'order.json'}",
                "/var/tmp/scrubbed": str(tmp_path / "scrubbed"),
                "__restored": f"__restored-{topic}",
            }
            words = [here.get(word, word) for word in shlex.split(command)]
            if words[1] == "rebuild" and stage.proxy.running:  # the page says that no proxy may run
                os.kill(stage.proxy.pid, signal.SIGTERM)
                assert stage.proxy.wait() == 0
            code = cli.run(words[1:])
            assert code == 0, f"{command}\n{capsys.readouterr()}"
    assert list(tmp_path.glob("lake-*"))


def test_the_python_of_the_page_runs(spark: SparkSession, stage: ReadStage, capsys: pytest.CaptureFixture[str]) -> None:
    here = {'"orders"': repr(stage.topic), '"tidegate.toml"': repr(stage.options["config"])}
    here["1735689600000"] = str(FIRST_TIME_MS)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / PAGE):
        if block.language == "python":
            text = block.text
            for theirs, mine in here.items():
                text = text.replace(theirs, mine)
            exec(text, names)
    assert names["spark"] is spark
    assert "|partition|" in capsys.readouterr().out
    assert names["stream"].isStreaming
    assert not names["orders"].isStreaming
