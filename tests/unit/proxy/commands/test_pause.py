"""`tidegate tier pause` and `resume` write with --yes alone, and change only what they name."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from proxy.commands.tier import pause as command
from proxy.commands.tier.pause import PauseChange, apply_pause
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import Tidegate
from tiers.config.topic_policy import TierWork, TopicConfig

COPYING, TRIMMING, EXPIRING, READING = TierWork
OTHER = {"local.retention.ms": "60000"}


async def test_a_pause_and_its_end_leave_the_other_settings() -> None:
    metadata = InMemoryRemoteLogMetadataManager()
    await metadata.change_topic_tier_config(PARTITION.topic_id, "orders", OTHER)

    async def changed(work: Collection[TierWork], is_paused: bool, write: bool = True) -> tuple[PauseChange, object]:
        change = await apply_pause(
            metadata, PARTITION, [TopicConfig(pattern="*")], work, is_paused=is_paused, write=write
        )
        return change, dict(metadata.state.topic_tier_config(PARTITION.topic_id))

    written = metadata.written
    change, config = await changed([COPYING], True, write=False)
    assert (change.changes, config) == (True, OTHER)
    change, _ = await changed([COPYING], False)
    assert (change.changes, metadata.written) == (False, written)
    change, config = await changed([TRIMMING, READING], True)
    assert (change.before, change.after) == ((), (READING, TRIMMING))
    assert config == {**OTHER, TRIMMING.key: "true", READING.key: "true"}
    change, config = await changed([READING], False)
    assert (change.after, config) == ((TRIMMING,), {**OTHER, TRIMMING.key: "true"})
    assert (await changed(list(TierWork), False))[1] == OTHER


async def test_a_pause_of_a_topic_that_is_not_tiered_says_why() -> None:
    metadata = InMemoryRemoteLogMetadataManager()

    async def why_not(*rules: TopicConfig) -> str | None:
        change = await apply_pause(metadata, PARTITION, rules, [COPYING], is_paused=True, write=True)
        return change.not_tiered

    assert await why_not(TopicConfig(pattern="*")) is None
    assert await why_not() == "no setting tiers it"
    excluded = await why_not(TopicConfig(pattern="*", remote_storage_enable=False))
    assert excluded == "the file excludes it: [[topics]] * has remote.storage.enable = false"


def test_the_command_says_that_the_topic_is_not_tiered(tidegate: Tidegate, monkeypatch: pytest.MonkeyPatch) -> None:
    async def change(settings: object, topic: str, work: object, **options: bool) -> PauseChange:
        return PauseChange(topic, (), (COPYING,), "no setting tiers it")

    monkeypatch.setattr(command, "change_pause", change)
    code, _, err = tidegate("tier", "pause", "tail", "--copying", "--yes")
    said = "warning: tail is not tiered: no setting tiers it\nThe change of tail was recorded.\n"
    assert (code, err) == (0, said)


def test_the_command_asks_for_what_is_named(tidegate: Tidegate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options it stops the owner and no reader. The answer says who obeys."""
    asked: list[tuple[set[TierWork], bool, bool]] = []

    async def change(
        settings: object, topic: str, work: Collection[TierWork], *, is_paused: bool, write: bool
    ) -> PauseChange:
        asked.append((set(work), is_paused, write))
        return PauseChange(topic, (), tuple(sorted(work)))

    monkeypatch.setattr(command, "change_pause", change)
    code, out, err = tidegate("tier", "pause", "orders")
    assert (code, "Nothing was written. Use --yes to write." in out + err) == (0, True)
    for options, said in (
        (["--reading"], ["proxy"]),
        (["--copying"], ["owners"]),
        (["--reading", "--expiring"], ["proxy", "owners"]),
    ):
        code, out, err = tidegate("tier", "pause", "orders", "--yes", *options)
        assert (code, [each for each in ("proxy", "owners") if each in (out + err).splitlines()[-1]]) == (0, said)
    tidegate("tier", "resume", "orders", "--yes")
    assert asked == [
        ({COPYING, TRIMMING, EXPIRING}, True, False),
        ({READING}, True, True),
        ({COPYING}, True, True),
        ({READING, EXPIRING}, True, True),
        (set(TierWork), False, True),
    ]
