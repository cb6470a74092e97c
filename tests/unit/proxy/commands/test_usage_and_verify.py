"""The sums of `usage`, and the missing offsets of `verify`."""

from __future__ import annotations

import pytest
import typer

from proxy.commands.tier.rewrap import rewrap_all
from proxy.commands.tier.segments import segments_with_keys
from proxy.commands.tier.tools import parse_target
from proxy.commands.tier.verify import verify_tier
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench
from tiers.access.open_tier import RemoteTierError
from tiers.segment.segment_encryption import KeyRing
from tiers.upkeep.usage import known_usage, listed_usage, topic_usage

KEYS = {"k1": b"1" * 32, "k2": b"2" * 32}


@pytest.mark.parametrize("current", [None, "k1"])
async def test_usage_is_what_the_files_take(bench: CommandBench, current: str | None) -> None:
    bench.ring = KeyRing(KEYS, current)
    segments = [await bench.tiered(0), await bench.tiered(10)]
    await bench.put_manifest()
    stored = sum(path.stat().st_size for path in bench.files())
    [known] = await known_usage(bench.tier(), [PARTITION], 2)
    [listed] = await listed_usage(bench.tier(), {PARTITION})
    assert known.total_bytes == listed.total_bytes == stored
    assert (known.segments, known.log_bytes, known.index_bytes) == (2, listed.log_bytes, listed.index_bytes)
    assert known.manifest_bytes == listed.manifest_bytes > 0
    assert known.overhead_bytes == known.log_bytes - sum(each.segment_size_bytes for each in segments)
    assert (known.overhead_bytes, listed.overhead_bytes) == (0 if current is None else 32, None)
    [topic] = topic_usage([known, known])
    assert (topic.total_bytes, topic.partition) == (2 * stored, None)


async def test_a_segment_without_a_size_is_named_and_the_others_count(bench: CommandBench) -> None:
    segments = [await bench.tiered(start) for start in (0, 10, 20)]
    [before] = await known_usage(bench.tier(), [PARTITION], 2)
    damaged, missing = (
        next(path for path in bench.files() if str(each.segment_id.id) in path.name and path.suffix == ".indexes")
        for each in segments[:2]
    )
    lost_bytes = damaged.stat().st_size + missing.stat().st_size
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    missing.unlink()
    [line] = await known_usage(bench.tier(), [PARTITION], 2)
    assert sorted(said[:36] for said in line.unreadable) == sorted(str(each.segment_id.id) for each in segments[:2])
    assert (line.segments, line.log_bytes) == (3, before.log_bytes)
    assert line.index_bytes == before.index_bytes - lost_bytes
    assert line.total_bytes == before.total_bytes - lost_bytes
    [topic] = topic_usage([line])
    assert topic.unreadable == line.unreadable


async def test_offsets_that_no_segment_has_are_a_finding(bench: CommandBench) -> None:
    await bench.tiered(0)
    await bench.tiered(20)
    done = await verify_tier(bench.tier(), None, 2, None)
    assert [(each.segment, each.first_offset, each.last_offset) for each in done.findings] == [(None, 10, 19)]
    await bench.rlmm.put_log_start(PARTITION, user_log_start(20))
    assert (await verify_tier(bench.tier(), None, 2, None)).findings == []


async def test_verified_segments_are_not_read_again(bench: CommandBench) -> None:
    notes = bench.folder / "notes"
    await bench.tiered(0)
    assert (await verify_tier(bench.tier(), None, 2, notes)).segments == 1
    with notes.open("a") as file:
        file.write('\n{"segment": "cut sho')
    await bench.tiered(10)
    done = await verify_tier(bench.tier(), None, 2, notes)
    assert (done.segments, done.already_verified) == (1, 1)
    done = await verify_tier(bench.tier(), None, 2, notes)
    assert (done.segments, done.already_verified) == (0, 2)
    with notes.open("w") as file:
        file.write("{}")
    with pytest.raises(RemoteTierError, match="was not written by this command"):
        await verify_tier(bench.tier(), None, 2, notes)
    notes.write_bytes(b"\x7fELF\xb0")
    with pytest.raises(RemoteTierError, match="was not written by this command"):
        await verify_tier(bench.tier(), None, 2, notes)


async def test_a_key_is_wrapped_again_and_the_old_one_not_needed(bench: CommandBench) -> None:
    plain = await bench.tiered(0)
    bench.ring = KeyRing(KEYS, "k1")
    sealed = await bench.tiered(10)
    bench.ring = KeyRing(KEYS, "k2")
    before = [path.read_bytes() for path in bench.files()]
    assert [each.segment for each in await rewrap_all(bench.tier(), None, False, 2)] == [str(sealed.segment_id.id)]
    assert [path.read_bytes() for path in bench.files()] == before
    [done] = await rewrap_all(bench.tier(), None, True, 2)
    assert (done.key, done.trouble) == ("k1", None)
    assert await rewrap_all(bench.tier(), None, True, 2) == []
    bench.ring = KeyRing({"k2": KEYS["k2"]}, "k2")
    assert (await verify_tier(bench.tier(), None, 2, None)).findings == []
    keys = {each.segment: each.key for each in await segments_with_keys(bench.tier(), "orders", 2)}
    assert keys == {str(plain.segment_id.id): "none", str(sealed.segment_id.id): "k2"}


async def test_a_missing_key_is_named_and_the_other_segments_are_done(bench: CommandBench) -> None:
    bench.ring = KeyRing({"lost": b"0" * 32}, "lost")
    await bench.tiered(0)
    bench.ring = KeyRing(KEYS, "k1")
    await bench.tiered(10)
    bench.ring = KeyRing(KEYS, "k2")
    found = {each.key: each.trouble for each in await rewrap_all(bench.tier(), None, True, 2)}
    assert found["k1"] is None
    assert "add it to [encryption.keys]" in str(found["lost"])


def test_a_target_is_a_topic_or_a_partition() -> None:
    assert parse_target(None) == (None, None)
    assert parse_target("orders") == ("orders", None)
    assert parse_target("orders:3") == ("orders", 3)
    for wrong in ("", ":3", "orders:", "orders:x", "orders:-1"):
        with pytest.raises(typer.BadParameter):
            parse_target(wrong)
