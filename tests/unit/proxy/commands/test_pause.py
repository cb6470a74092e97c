"""`tidegate tier pause` and `resume` write with --yes alone, and change only what they name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy import cli
from proxy.commands.tier import pause as command
from proxy.commands.tier.pause import PauseChange, apply_pause
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.segments import PARTITION
from tiers.config.topic_policy import TierWork

COPYING, TRIMMING, EXPIRING, READING = TierWork
OTHER = {"local.retention.ms": "60000"}


@pytest.fixture
async def metadata() -> InMemoryRemoteLogMetadataManager:
    made = InMemoryRemoteLogMetadataManager()
    await made.change_topic_tier_config(PARTITION.topic_id, "orders", OTHER)
    return made


async def changed(
    metadata: InMemoryRemoteLogMetadataManager, work: Collection[TierWork], *, is_paused: bool, write: bool = True
) -> tuple[PauseChange, dict[str, str]]:
    change = await apply_pause(metadata, PARTITION, work, is_paused=is_paused, write=write)
    return change, dict(metadata.state.topic_tier_config(PARTITION.topic_id))


async def test_a_pause_and_its_end_leave_the_other_settings(metadata: InMemoryRemoteLogMetadataManager) -> None:
    change, config = await changed(metadata, [TRIMMING, READING], is_paused=True)
    assert (change.before, change.after) == ((), (READING, TRIMMING))
    assert config == {**OTHER, "remote.log.trimming.paused": "true", "remote.log.reading.paused": "true"}
    change, config = await changed(metadata, [READING], is_paused=False)
    assert (change.after, config) == ((TRIMMING,), {**OTHER, "remote.log.trimming.paused": "true"})
    assert (await changed(metadata, list(TierWork), is_paused=False))[1] == OTHER


async def test_nothing_is_written_without_a_word_or_without_a_change(
    metadata: InMemoryRemoteLogMetadataManager,
) -> None:
    written = metadata.written
    change, config = await changed(metadata, [COPYING], is_paused=True, write=False)
    assert (change.changes, config) == (True, OTHER)
    change, _ = await changed(metadata, [COPYING], is_paused=False)
    assert (change.changes, metadata.written) == (False, written)


class Operator:
    def __init__(self, config: Path) -> None:
        self.config = config
        self.asked: list[tuple[set[TierWork], bool, bool]] = []

    async def change(
        self, settings: object, topic: str, work: Collection[TierWork], *, is_paused: bool, write: bool
    ) -> PauseChange:
        self.asked.append((set(work), is_paused, write))
        return PauseChange(topic, (), tuple(sorted(work)))

    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["tier", *arguments, "--config", str(self.config)])
        return done.exit_code, done.output


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    config = tmp_path / "tidegate.toml"
    config.write_text('[upstream]\nbootstrap.servers = "127.0.0.1:1"\n')
    made = Operator(config)
    monkeypatch.setattr(command, "change_pause", made.change)
    return made


def test_a_pause_without_options_stops_the_owner_and_no_reader(operator: Operator) -> None:
    code, out = operator.run("pause", "orders")
    assert (code, "Nothing was written. Use --yes to write." in out) == (0, True)
    operator.run("pause", "orders", "--reading", "--yes")
    operator.run("resume", "orders", "--yes")
    assert operator.asked == [
        ({COPYING, TRIMMING, EXPIRING}, True, False),
        ({READING}, True, True),
        (set(TierWork), False, True),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reading"], "Every proxy obeys it within 10 s."),
        (["--copying"], "The owners obey it within 10 s."),
        (["--trimming"], "The owners obey it within 10 s. The owners also obey it before each trim and expiry."),
        (
            ["--reading", "--expiring"],
            "Every proxy obeys it within 10 s. The owners also obey it before each trim and expiry.",
        ),
    ],
)
def test_the_answer_says_who_obeys_and_when(options: list[str], said: str, operator: Operator) -> None:
    code, out = operator.run("pause", "orders", "--yes", *options)
    assert (code, out.splitlines()[-1]) == (0, f"The change of orders was recorded. {said}")


def test_a_partition_cannot_be_paused(operator: Operator) -> None:
    code, out = operator.run("pause", "orders:0")
    assert (code, operator.asked) == (2, [])
    assert "expected TOPIC without a partition" in out
