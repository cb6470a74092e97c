"""`tidegate tier retention` shows what would expire and writes with --yes alone; `tidegate check` names the risks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from proxy import cli
from proxy.commands.tier import retention as command
from proxy.commands.tier.retention import PartitionExpiry, RetentionChange, apply_total
from proxy.commands.topic_check import conflicts, risks_of
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.segment_metadata import copied, segment
from tiers.access.open_tier import RemoteTierError
from tiers.config.topic_policy import TopicConfig, TopicPolicy, policy_of
from tiers.config.total_retention import RETENTION_MINUTES, TotalRetention
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.retention.uncopied_watch import HeadBatch

PARTITION = TopicIdPartition(UUID(int=7), 0, "orders")
DAY_MS = 86_400_000
BROKER = {"cleanup.policy": "delete", "retention.ms": str(DAY_MS), "retention.bytes": "-1"}
CHANGE = RetentionChange(
    topic="orders",
    broker="86400000 ms, unlimited bytes",
    file="none",
    recorded="none",
    wanted="remote.log.retention.minutes=60",
    total_before="86400000 ms, unlimited bytes",
    total_after="3600000 ms, unlimited bytes",
    expires=(PartitionExpiry(0, 30, 3, 3000, 1_700_000_000_000),),
    differs_from_file=False,
    changes=True,
)


class Operator:
    def __init__(self, config: Path) -> None:
        self.config = config
        self.asked: list[tuple[str, TotalRetention, bool]] = []
        self.answer = CHANGE

    async def change(self, settings: object, topic: str, wanted: TotalRetention, write: bool) -> RetentionChange:
        self.asked.append((topic, wanted, write))
        return self.answer

    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["tier", "retention", *arguments, "--config", str(self.config)])
        return done.exit_code, done.output


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    config = tmp_path / "tidegate.toml"
    config.write_text('[upstream]\nbootstrap.servers = "127.0.0.1:1"\n')
    made = Operator(config)
    monkeypatch.setattr(command, "change_retention", made.change)
    return made


@pytest.fixture
async def metadata() -> InMemoryRemoteLogMetadataManager:
    """Three segments, one day apart. The last record of each is as old as its number of days."""
    made = InMemoryRemoteLogMetadataManager()
    for days, start in ((2, 0), (1, 10), (0, 20)):
        newest_ms = (10 - days) * DAY_MS
        await copied(made, replace(segment(PARTITION, start, start + 9), max_timestamp_ms=newest_ms))
    return made


async def applied(
    metadata: InMemoryRemoteLogMetadataManager,
    wanted: TotalRetention,
    *,
    write: bool = True,
    rule: TopicConfig | None = None,
    broker: Mapping[str, str] = BROKER,
) -> RetentionChange:
    rule = rule or TopicConfig(pattern="orders")
    return await apply_total(metadata, [PARTITION], rule, broker, wanted, write=write, now_ms=10 * DAY_MS + 1)


def test_without_yes_nothing_is_written(operator: Operator) -> None:
    code, out = operator.run("orders", "--minutes", "60")
    assert (code, "Nothing was written" in out) == (0, True)
    assert "these segments expire" in out
    assert ["orders-0", "3", "2.93", "KiB", "30"] in [line.split()[:5] for line in out.splitlines()]
    code, out = operator.run("orders", "--minutes", "60", "--bytes", "-1", "--yes")
    assert (code, "was recorded" in out) == (0, True)
    assert operator.asked == [
        ("orders", TotalRetention(60), False),
        ("orders", TotalRetention(60, -1), True),
    ]


def test_the_answer_says_that_expired_records_cannot_be_restored(operator: Operator) -> None:
    warning = "Use --yes to write. Expired records cannot be restored."
    assert warning in operator.run("orders", "--minutes", "60")[1]
    operator.answer = replace(CHANGE, expires=())
    assert warning not in operator.run("orders", "--minutes", "60")[1]


def test_the_answer_is_for_programs_too(operator: Operator) -> None:
    code, out = operator.run("orders", "--json")
    assert code == 0
    assert json.loads(out[: out.rindex("}") + 1])["expires"][0]["segments"] == 3


@pytest.mark.parametrize("value", ["-2", "soon"])
def test_a_value_that_is_no_retention_is_refused(operator: Operator, value: str) -> None:
    assert operator.run("orders", "--minutes", value)[0] == 2
    assert operator.asked == []


async def test_a_shorter_total_shows_first_what_expires(metadata: InMemoryRemoteLogMetadataManager) -> None:
    wanted = TotalRetention(minutes=1_440)
    for write in (False, True):
        found = await applied(metadata, wanted, write=write)
        assert [(each.segments, each.log_start_offset) for each in found.expires] == [(2, 20)]
        assert found.changes
        assert dict(metadata.topic_tier_config(PARTITION.topic_id)) == (wanted.config() if write else {})
    assert not (await applied(metadata, wanted)).changes


async def test_a_longer_total_expires_nothing(metadata: InMemoryRemoteLogMetadataManager) -> None:
    found = await applied(metadata, TotalRetention(minutes=90 * 1_440))
    assert (found.expires, found.total_after) == ((), f"{90 * DAY_MS} ms, unlimited bytes")


async def test_a_file_with_another_total_is_named(metadata: InMemoryRemoteLogMetadataManager) -> None:
    rule = TopicConfig(pattern="orders", total_retention_minutes=90 * 1_440)
    assert (await applied(metadata, TotalRetention(minutes=1_440), rule=rule)).differs_from_file
    assert not (await applied(metadata, TotalRetention(minutes=90 * 1_440), rule=rule)).differs_from_file


async def test_a_total_that_the_rules_refuse_is_not_written(metadata: InMemoryRemoteLogMetadataManager) -> None:
    own = {"remote.storage.enable": "true", "local.retention.ms": str(DAY_MS)}
    await metadata.change_topic_tier_config(PARTITION.topic_id, "orders", own)
    with pytest.raises(RemoteTierError, match=r"local\.retention\.ms"):
        await applied(metadata, TotalRetention(minutes=60))
    assert dict(metadata.topic_tier_config(PARTITION.topic_id)) == own


async def test_settings_that_were_changed_meanwhile_refuse_the_command(
    metadata: InMemoryRemoteLogMetadataManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = metadata.change_topic_tier_config

    async def after_another(*arguments: object) -> None:
        await change(PARTITION.topic_id, "orders", {RETENTION_MINUTES: "7"})
        await change(*arguments)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(metadata, "change_topic_tier_config", after_another)
    with pytest.raises(RemoteTierError, match="were changed meanwhile"):
        await applied(metadata, TotalRetention(minutes=60))
    assert dict(metadata.topic_tier_config(PARTITION.topic_id)) == {RETENTION_MINUTES: "7"}


def policy(recorded: TotalRetention, minutes: int | None = None) -> TopicPolicy:
    rule = TopicConfig(pattern="orders", total_retention_minutes=minutes)
    made = policy_of("orders", PARTITION.topic_id, 1, rule, BROKER, recorded.config())
    assert isinstance(made, TopicPolicy)
    return made


def risks(recorded: TotalRetention, lso: int, first: HeadBatch | None, held: HeadBatch | None = None) -> list[str]:
    bounds = LocalLogBounds(0, lso, 100, 0)
    return risks_of(policy(recorded), PARTITION, bounds, 10, first, held, 10 * DAY_MS)


def test_a_check_names_records_that_the_broker_may_remove_uncopied() -> None:
    total = TotalRetention(minutes=90 * 1_440)
    old, new = HeadBatch(7 * DAY_MS, 10.0), HeadBatch(10 * DAY_MS - DAY_MS // 3, 10.0)
    [problem] = risks(total, 100, old)
    assert "the records from offset 10 on are not copied, and have used 100 % of the broker's retention" in problem
    assert risks(total, 100, new) == []
    assert risks(total, 100, None) == []
    assert risks(TotalRetention(), 100, old) == []


def test_a_check_names_a_transaction_that_hangs() -> None:
    [problem] = risks(TotalRetention(), 50, None, HeadBatch(10 * DAY_MS - 900_000, 10.0))
    assert "orders-0: the record at the last stable offset 50 is 15 minutes old: a transaction hangs" in problem
    assert risks(TotalRetention(), 50, None, HeadBatch(10 * DAY_MS - 899_999, 10.0)) == []


def test_a_check_names_a_total_that_is_not_in_force() -> None:
    [problem] = conflicts([policy(TotalRetention(minutes=90), minutes=60), policy(TotalRetention())])
    assert problem.startswith("orders: nothing expires: the file has remote.log.retention.minutes=60, and")
