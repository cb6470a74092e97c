"""`verify` names missing offsets, and `rewrap` wraps keys again."""

from __future__ import annotations

import pytest
import typer

from proxy.commands.tier.rewrap import rewrap_all
from proxy.commands.tier.segments import segments_with_keys
from proxy.commands.tier.tools import parse_partition, parse_target
from proxy.commands.tier.verify import verify_tier
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench, Tidegate
from tiers.access.open_tier import RemoteTierError
from tiers.segment.segment_encryption import KeyRing

KEYS = {"k1": b"1" * 32, "k2": b"2" * 32}


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
    for strange in (b"{}", b"\x7fELF\xb0"):
        notes.write_bytes(strange)
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


def test_a_folder_name_in_place_of_a_partition_gets_a_hint() -> None:
    assert parse_partition("orders:3") == ("orders", 3)
    with pytest.raises(typer.BadParameter, match="Did you mean web-orders:3"):
        parse_partition("web-orders-3")


def test_without_encryption_there_is_nothing_to_rewrap(tidegate: Tidegate) -> None:
    code, out, err = tidegate("tier", "rewrap")
    assert (code, out) == (2, "")
    assert err.startswith("tidegate: encryption is off: [encryption] has no `current`")
