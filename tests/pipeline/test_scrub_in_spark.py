"""`scrub` finds each planted fault and nothing else, on Spark and without it: real Kafka, real S3. `usage` agrees."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pipeline import cli as pipeline_cli
from proxy import cli
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import tidegate_over
from tests.support.servers.versitygw import VersityGateway
from tiers.storage.object_key import parse_segment_key

pytestmark = pytest.mark.integration

RECORDS = 1_000
BUCKET = "scrub"


@dataclass
class Site:
    config: Path
    objects: Path

    def run(self, *arguments: str) -> tuple[int, Any, str]:
        main = cli.run if arguments[0] == "tier" else pipeline_cli.run
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = main([*arguments, "--config", str(self.config), "--json"])
        assert out.getvalue(), err.getvalue()
        return code, json.loads(out.getvalue()), err.getvalue()

    def files(self, suffix: str = "") -> list[Path]:
        """The objects of the topic; the marker of the tier is of none."""
        paths = (path for path in self.objects.rglob(f"*{suffix}") if path.is_file())
        return sorted(path for path in paths if path.name != "tier.json")

    def is_all_remote(self) -> bool:
        ends = [parse_segment_key(str(path.relative_to(self.objects))) for path in self.files(".indexes")]
        return any(each is not None and each.end_offset == RECORDS - 1 for each in ends)


@pytest.fixture
async def site(kafka_of_three: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path) -> Site:
    await s3.create_bucket(BUCKET)
    topic = topic_name[-40:]
    create_topic(kafka_of_three.bootstrap_servers, topic)
    storage = {"implementation": "s3", "prefix": f"{topic[-8:]}/", **s3.settings(BUCKET)}
    config = tmp_path / "operator.toml"
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic}",
        "remote.log.visible.after.ms": 1000,
    }
    with tidegate_over(
        kafka_of_three, tmp_path, tiered=[topic], segment_bytes=150_000, storage=storage, settings=settings
    ) as proxy:
        produce(proxy.bootstrap_servers, topic, random_values(RECORDS))
        site = Site(config, s3.folder / "data" / BUCKET / storage["prefix"])
        until(site.is_all_remote)
        config.write_text(proxy.config.read_text())
    return site


@pytest.mark.usefixtures("spark")
def test_planted_faults_are_found_and_nothing_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # The session of the whole test run: these commands run in this process.
    monkeypatch.setattr("proxy.commands.tier.tools.set_up_logging", lambda level, text: None)
    code, whole, _ = site.run("scrub", "--level", "deep")
    assert (code, whole["findings"]) == (0, [])
    logs = site.files(".log")
    assert (whole["segments"], whole["log_bytes"]) == (len(logs), sum(path.stat().st_size for path in logs))
    assert whole["records"] == RECORDS

    _usage_agrees(site)

    content = logs[1].read_bytes()
    logs[1].write_bytes(content[:1000] + bytes((content[1000] ^ 1,)) + content[1001:])
    orphan = logs[0].with_name(f"{logs[0].name[:42]}{uuid4()}.log")
    orphan.write_bytes(b"nobody's")
    code, found, _ = site.run("scrub", "--grace", "0s")
    assert code == 1
    assert sorted((each["kind"], each["segment"]) for each in found["findings"]) == [
        ("damaged", logs[1].stem[42:]),
        ("orphan", orphan.stem[42:]),
    ]
    code, on_spark, _ = site.run("scrub", "--grace", "0s", "--master", "local[2]")
    assert (code, on_spark) == (1, found)
    [row] = [each for each in found["findings"] if each["kind"] == "orphan"]
    assert (row["object"], row["size_bytes"]) == (str(orphan.relative_to(site.objects)), 8)

    delete = partial(site.run, "scrub", "--level", "meta", "--grace", "0s", "--delete-orphans")
    code, found, said = delete()
    assert (code, orphan.exists()) == (1, True)
    assert "Nothing was deleted. With --apply, 1 segments would be deleted" in said
    code, found, _ = delete("--apply")
    assert (code, found["findings"], found["deleted_segments"], orphan.exists()) == (0, [], 1, False)
    assert len(site.files(".log")) == len(logs)


def _usage_agrees(site: Site) -> None:
    stored = sum(path.stat().st_size for path in site.files(".log"))
    code, found, _ = site.run("usage", "--by", "partition", "--price-per-gib-month", "1")
    [line] = found["lines"]
    assert (code, line["total_bytes"], line["cost_per_month"]) == (0, stored, stored / (1 << 30))
