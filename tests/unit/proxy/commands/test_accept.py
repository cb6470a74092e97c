"""`tidegate tier accept` restores what the store knows, and loses no settings by it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from proxy import cli
from proxy.commands.tier import accept
from proxy.commands.tier.bounds import PartitionBounds
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench
from tests.support.proxy.parsed_config import parse_config
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import NO_TOTAL, TOTAL_KEYS, TotalRetention, recorded_total
from tiers.errors import RetriableRemoteStorageError
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.tasks.history.stored_facts import read_stored_facts
from tiers.tasks.history.tier_place import read_marker

CONFIG = parse_config('[upstream]\nbootstrap.servers = "localhost:1"\n')
BOUNDS = PartitionBounds(PARTITION.topic, PARTITION.partition)
NINETY_DAYS = 129_600


@pytest.fixture(autouse=True)
def opened(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(topic_id=PARTITION.topic_id, partitions={PARTITION.partition: None})
    cluster = SimpleNamespace(topics={PARTITION.topic: known}, cluster_id=CLUSTER_ID)

    def giving(value: Any) -> Any:
        @asynccontextmanager
        async def opening(*args: Any, **options: Any) -> AsyncIterator[Any]:
            yield value

        return opening

    async def partition_bounds(*args: Any) -> PartitionBounds:
        return BOUNDS

    async def is_needed(*args: Any) -> bool:
        return True

    monkeypatch.setattr(accept, "tiered_cluster", giving((None, cluster)))
    monkeypatch.setattr(accept, "open_storage", giving(bench.storage))
    monkeypatch.setattr(accept, "metadata_to_now", giving(bench.rlmm.log))
    monkeypatch.setattr(accept, "partition_bounds", partition_bounds)
    monkeypatch.setattr(accept, "_is_needed", is_needed)
    log = InMemoryLog(b"".join(batch_of(start, 10) for start in (0, 10)))
    monkeypatch.setattr(accept, "BrokerLogSource", lambda client: log)


async def accepted(bench: CommandBench, write: bool = True) -> accept.Acceptance:
    done = await accept.accept_partition(CONFIG, PARTITION.topic, PARTITION.partition, write)
    assert (done.bounds, done.is_needed) == (BOUNDS, True)
    return done


async def test_an_acceptance_announces_what_only_the_store_knows(bench: CommandBench) -> None:
    """It names the lost position, so that the owner's doubt ends."""
    await bench.tiered(0)
    await bench.put_facts()
    bench.rlmm.is_position_confirmed = False
    lost = await bench.stored(10)
    assert (await accepted(bench)).not_restored == ()
    bench.rlmm.is_position_confirmed = True
    stored = await read_stored_facts(bench.storage, CLUSTER_ID, PARTITION)
    assert len(stored.not_accepted()) == 1
    assert (await accepted(bench)).not_restored == ()
    known = bench.state.remote_log_segment_metadata_by_id(lost.segment_id)
    assert known is not None
    assert known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
    stored = await read_stored_facts(bench.storage, CLUSTER_ID, PARTITION)
    assert await stored.lost_reason(bench.rlmm.log, 1) == ""


async def test_an_acceptance_writes_a_lost_marker_again(bench: CommandBench) -> None:
    await bench.rlmm.put_tier_marker("", UUID(int=3), is_confirmed=True)
    await accepted(bench, write=False)
    assert await read_marker(bench.storage, CLUSTER_ID) is None
    await accepted(bench)
    assert await read_marker(bench.storage, CLUSTER_ID) == UUID(int=3)


async def total_after_an_acceptance(bench: CommandBench, lost_to: TotalRetention) -> TotalRetention:
    """The facts have a total of 90 days. The metadata lost records and has `lost_to` again."""
    settings = PARTITION.topic_id, PARTITION.topic
    await bench.rlmm.change_topic_tier_config(*settings, TotalRetention(minutes=NINETY_DAYS).config())
    await bench.put_facts()
    await bench.rlmm.change_topic_tier_config(*settings, {**dict.fromkeys(TOTAL_KEYS), **lost_to.config()})
    await accepted(bench)
    return recorded_total(bench.state.topic_tier_config(PARTITION.topic_id))


@pytest.mark.parametrize(
    ("lost_to", "total"),
    [
        (NO_TOTAL, TotalRetention(-1, -1)),
        (TotalRetention(minutes=1_440), TotalRetention(NINETY_DAYS, -1)),
        (TotalRetention(minutes=2 * NINETY_DAYS), TotalRetention(2 * NINETY_DAYS, -1)),
    ],
)
async def test_an_acceptance_shortens_no_total_that_was_lost(
    bench: CommandBench, lost_to: TotalRetention, total: TotalRetention
) -> None:
    bench.rlmm.is_position_confirmed = False
    assert await total_after_an_acceptance(bench, lost_to) == total


async def test_an_acceptance_of_whole_metadata_changes_no_total(bench: CommandBench) -> None:
    assert await total_after_an_acceptance(bench, NO_TOTAL) == NO_TOTAL


@pytest.mark.parametrize("is_lost", [True, False])
async def test_an_acceptance_ends_no_pause_that_was_lost(bench: CommandBench, is_lost: bool) -> None:
    settings, key = (PARTITION.topic_id, PARTITION.topic), TierWork.EXPIRING.key
    await bench.rlmm.change_topic_tier_config(*settings, {key: "true"})
    await bench.put_facts()
    await bench.rlmm.change_topic_tier_config(*settings, {key: None})
    bench.rlmm.is_position_confirmed = not is_lost
    await accepted(bench)
    assert bench.state.topic_tier_config(PARTITION.topic_id) == ({key: "true"} if is_lost else {})


async def test_without_yes_nothing_is_written(bench: CommandBench) -> None:
    await accepted(bench, write=False)
    assert bench.files() == []


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], str]]:
    path = tmp_path / "tidegate.toml"
    path.write_text('[upstream]\nbootstrap.servers = "localhost:1"\n')

    def running(*arguments: str) -> tuple[int, list[str], str]:
        target = f"{PARTITION.topic}:{PARTITION.partition}"
        code = cli.run(["tier", "accept", target, *arguments, "--config", str(path)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return running


async def nothing_to_accept(*args: Any) -> bool:
    return False


def test_a_partition_that_is_not_stopped_has_nothing_to_accept(
    bench: CommandBench, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, list[str], str]]
) -> None:
    monkeypatch.setattr(accept, "_is_needed", nothing_to_accept)
    monkeypatch.setattr(bench.state, "is_known", lambda partition: True)
    code, _, err = run("--yes")
    name = f"{PARTITION.topic}-{PARTITION.partition}"
    said = f"{name}: nothing to accept: the metadata, the store and the leader agree. Nothing was written.\n"
    assert (code, err) == (0, said)
    assert bench.files() == []


def test_a_topic_that_is_not_tiered_is_an_error(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, list[str], str]]
) -> None:
    monkeypatch.setattr(accept, "_is_needed", nothing_to_accept)
    topic = PARTITION.topic
    said = f"tidegate: {topic} is not tiered: the metadata has no record of {topic}:{PARTITION.partition}\n"
    assert run() == (3, [], said)


def test_the_command_says_why_an_acceptance_is_needed(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, list[str], str]]
) -> None:
    async def partition_bounds(*args: Any) -> PartitionBounds:
        return replace(BOUNDS, unknown=(LogGap(30, 60),))

    monkeypatch.setattr(accept, "partition_bounds", partition_bounds)
    code, out, err = run()
    name = f"{PARTITION.topic}-{PARTITION.partition}"
    assert (code, err) == (0, "Nothing was written. Use --yes to write.\n")
    assert out[-3:] == [
        f"{name}: neither tier has the offsets 30 to 59",
        f"{name}: the metadata, the store and the leader do not agree",
        f"{name}: with an acceptance, the owner reads back the segments of these offsets that the store has, and"
        " records a gap for the rest",
    ]
    _, out, _ = run("--json")
    found = json.loads("".join(out))
    assert (found["unknown"], found["not_restored"]) == ([{"first_offset": 30, "next_offset": 60}], [])


async def test_a_store_that_does_not_answer_is_nothing_to_accept(
    bench: CommandBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get_object(key: str) -> bytes:
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(bench.storage, "get_object", get_object)
    written = bench.rlmm.written
    with pytest.raises(RetriableRemoteStorageError):
        await accepted(bench)
    assert bench.rlmm.written == written
