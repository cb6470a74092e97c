"""`tidegate tier accept` restores what the store knows, loses no settings by it, and writes only when in doubt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from uuid import UUID

import pytest

from proxy.commands.tier import accept
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench, Tidegate, open_by
from tests.support.proxy.parsed_config import parse_config
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import TOTAL_KEYS, TotalRetention
from tiers.errors import RetriableRemoteStorageError
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.tasks.history.stored_facts import read_stored_facts
from tiers.tasks.history.tier_place import read_marker

CONFIG = parse_config('[upstream]\nbootstrap.servers = "localhost:1"\n')
NAME = f"{PARTITION.topic}-{PARTITION.partition}"
TARGET = f"{PARTITION.topic}:{PARTITION.partition}"
NINETY_DAYS = 129_600
PAUSE = {TierWork.EXPIRING.key: "true"}


@pytest.fixture
def log(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> InMemoryLog:
    made = InMemoryLog(b"".join(batch_of(start, 10) for start in (0, 10, 20)))
    open_by(accept, bench, made, monkeypatch)
    return made


@pytest.fixture
async def tiered(bench: CommandBench, log: InMemoryLog) -> InMemoryLog:
    """Two segments of ten records are remote, and the broker has the records from 15 to 29."""
    await bench.tiered(0)
    await bench.tiered(10)
    await bench.rlmm.put_local_log_start(PARTITION, OffsetAndEpoch(15, 0))
    await bench.put_facts()
    log.log_start_offset = 15
    return log


async def accepted(*, write: bool = True) -> accept.Acceptance:
    return await accept.accept_partition(CONFIG, PARTITION.topic, PARTITION.partition, write)


@pytest.mark.parametrize(
    ("case", "is_needed"),
    [
        ("healthy", False),
        ("a recorded gap", False),
        ("deleted records", False),
        ("an unknown gap", True),
        ("a forgotten segment", True),
        ("a lost position", True),
    ],
)
async def test_an_acceptance_is_needed_only_in_doubt(
    bench: CommandBench, tiered: InMemoryLog, case: str, is_needed: bool
) -> None:
    if case in ("a recorded gap", "deleted records", "an unknown gap"):
        tiered.log_start_offset = 25
    match case:
        case "a recorded gap":
            await bench.rlmm.put_log_gap(PARTITION, LogGap(20, 25), 0)
        case "deleted records":
            await bench.rlmm.put_log_start(PARTITION, LogStart(25, 0, LogStartReason.USER))
        case "a forgotten segment":
            del bench.rlmm.segments[(await bench.tiered(20)).segment_id]
        case "a lost position":
            bench.rlmm.is_position_confirmed = False
    before = bench.files()
    assert (await accepted(write=False)).is_needed is is_needed
    assert bench.files() == before


async def test_an_acceptance_announces_what_only_the_store_knows(bench: CommandBench, log: InMemoryLog) -> None:
    """It names the lost position, so that the owner's doubt ends."""
    await bench.tiered(0)
    await bench.put_facts()
    bench.rlmm.is_position_confirmed = False
    lost = await bench.stored(10)
    assert (await accepted()).not_restored == ()
    bench.rlmm.is_position_confirmed = True
    assert len((await read_stored_facts(bench.storage, CLUSTER_ID, PARTITION)).not_accepted()) == 1
    assert (await accepted()).not_restored == ()
    known = bench.state.remote_log_segment_metadata_by_id(lost.segment_id)
    assert known is not None
    assert known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
    stored = await read_stored_facts(bench.storage, CLUSTER_ID, PARTITION)
    assert await stored.lost_reason(bench.rlmm.log, 1) == ""


async def test_an_acceptance_writes_a_lost_marker_again(bench: CommandBench, log: InMemoryLog) -> None:
    await bench.rlmm.put_tier_marker("", UUID(int=3), is_confirmed=True)
    await accepted(write=False)
    assert await read_marker(bench.storage, CLUSTER_ID) is None
    await accepted()
    assert await read_marker(bench.storage, CLUSTER_ID) == UUID(int=3)


@pytest.mark.parametrize(
    ("lost_to", "is_lost", "kept"),
    [
        ({}, True, TotalRetention(-1, -1).config() | PAUSE),
        (TotalRetention(minutes=1_440).config(), True, TotalRetention(NINETY_DAYS, -1).config() | PAUSE),
        (TotalRetention(2 * NINETY_DAYS).config(), True, TotalRetention(2 * NINETY_DAYS, -1).config() | PAUSE),
        ({}, False, {}),
    ],
)
async def test_an_acceptance_shortens_no_total_and_ends_no_pause(
    bench: CommandBench, tiered: InMemoryLog, lost_to: Mapping[str, str], is_lost: bool, kept: Mapping[str, str]
) -> None:
    """The facts have a total of 90 days and a pause. If metadata was lost, it may have lost these too."""
    topic = PARTITION.topic_id, PARTITION.topic
    await bench.rlmm.change_topic_tier_config(*topic, TotalRetention(minutes=NINETY_DAYS).config() | PAUSE)
    await bench.put_facts()
    await bench.rlmm.change_topic_tier_config(*topic, {**dict.fromkeys([*TOTAL_KEYS, *PAUSE]), **lost_to})
    bench.rlmm.is_position_confirmed = not is_lost
    tiered.log_start_offset = 25
    assert (await accepted()).is_needed
    assert bench.state.topic_tier_config(PARTITION.topic_id) == kept


def test_nothing_is_accepted_where_nothing_is_in_doubt(
    bench: CommandBench, log: InMemoryLog, tidegate: Tidegate, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = tidegate("tier", "accept", TARGET)
    assert (code, f"{PARTITION.topic} is not tiered" in err) == (3, True)
    monkeypatch.setattr(bench.state, "is_known", lambda partition: True)
    code, _, err = tidegate("tier", "accept", TARGET, "--yes")
    assert (code, "nothing to accept" in err, bench.files()) == (0, True, [])


def test_the_command_says_why_an_acceptance_is_needed(tiered: InMemoryLog, tidegate: Tidegate) -> None:
    tiered.log_start_offset = 25
    code, out, err = tidegate("tier", "accept", TARGET)
    assert (code, err) == (0, "Nothing was written. Use --yes to write.\n")
    assert f"{NAME}: neither tier has the offsets 20 to 24" in out
    _, out, _ = tidegate("tier", "accept", TARGET, "--json")
    found = json.loads(out)
    assert (found["unknown"], found["not_restored"]) == ([{"first_offset": 20, "next_offset": 25}], [])


async def test_a_store_that_does_not_answer_is_nothing_to_accept(
    bench: CommandBench, tiered: InMemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get_object(key: str) -> bytes:
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(bench.storage, "get_object", get_object)
    written = bench.rlmm.written
    with pytest.raises(RetriableRemoteStorageError):
        await accepted()
    assert bench.rlmm.written == written
