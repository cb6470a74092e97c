"""Share groups (KIP-932) through the proxy see only the local tier, because the broker reads for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.clients.share_member import ShareMember, start_at_earliest
from tests.support.rigs.two_tiers_rig import TwoTiers
from tests.support.servers.producing import produce, random_values

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def member() -> Iterator[ShareMember]:
    with ShareMember() as member:
        yield member


async def run(tools: KafkaTools, tiers: TwoTiers, script: str, *args: str) -> str:
    """Runs a tool through the proxy."""
    done = await asyncio.to_thread(tools.run, script, tiers.bootstrap, *args)
    assert done.exit_code == 0, (done.output, done.errors)
    return done.output


def column(table: str, name: str, topic: str) -> list[str]:
    """Returns a column of the lines about a topic in the output of `kafka-share-groups`."""
    header, *lines = [line.split() for line in table.splitlines() if line.strip()]
    return [line[header.index(name)] for line in lines if topic in line]


async def trimmed_to(tiers: TwoTiers, topic: str, offset: int) -> None:
    async with asyncio.timeout(300):
        while True:
            if await tiers.local_log_start(topic) == offset:
                return
            await asyncio.sleep(0.1)


async def test_a_share_group_sees_the_local_tier_and_trims_wait_for_it(
    tiers: TwoTiers, tools: KafkaTools, member: ShareMember, topic: str
) -> None:
    of_group = ("--group", topic)
    await asyncio.to_thread(start_at_earliest, tiers.bootstrap, topic)
    values = random_values(150)
    local_start = await tiers.filled(topic, values)
    assert 0 < local_start < 150

    await asyncio.to_thread(member.join, tiers.bootstrap, topic, topic)
    taken = await asyncio.to_thread(member.take, 150 - local_start)
    assert [one.offset for one in taken] == list(range(local_start, 150)), "only local records are visible"
    assert [one.value for one in taken] == values[local_start:]
    # The stored start offset is that from before an acknowledgement. This record brings it to 150.
    await asyncio.to_thread(produce, tiers.bootstrap, topic, values[:1])
    await asyncio.to_thread(member.take, 1)
    members = await run(tools, tiers, "kafka-share-groups", *of_group, "--describe", "--members")
    assert len(members.strip().splitlines()) == 2, "the list must have a header and one member"

    await asyncio.to_thread(member.leave)
    more = random_values(100)
    await asyncio.to_thread(produce, tiers.bootstrap, topic, more)
    await trimmed_to(tiers, topic, 150)
    assert await tiers.filled(f"{topic}-other", random_values(150)) > 0, "other topics must be trimmed"
    assert await tiers.local_log_start(topic) == 150, "the trim must stop at the group's start offset"
    described = await run(tools, tiers, "kafka-share-groups", *of_group, "--describe", "--offsets")
    assert column(described, "START-OFFSET", topic) == ["150"]

    await asyncio.to_thread(member.join, tiers.bootstrap, topic, topic)
    taken = await asyncio.to_thread(member.take, 100)
    assert [one.value for one in taken] == more
    await asyncio.to_thread(produce, tiers.bootstrap, topic, values[:1])
    await asyncio.to_thread(member.take, 1)
    settled = await tiers.settled(topic)
    assert settled > 150, "trims must continue when the group has caught up"

    await asyncio.to_thread(member.leave)
    reset = await run(
        tools, tiers, "kafka-share-groups", *of_group, "--reset-offsets", "--to-earliest", "--topic", topic, "--execute"
    )
    assert column(reset, "NEW-OFFSET", topic) == ["0"], "the log starts in the remote tier"
    await asyncio.to_thread(member.join, tiers.bootstrap, topic, topic)
    taken = await asyncio.to_thread(member.take, 1)
    assert taken[0].offset == settled, "the broker must move the group to its local log start"
    await asyncio.to_thread(member.leave)
