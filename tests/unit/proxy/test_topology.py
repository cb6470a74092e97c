"""Brokers that join get a listener before any client learns of them. The topology follows brokers that move."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import cast
from uuid import UUID

import pytest

from proxy.cluster.broker_listeners import ListenerAddresses
from proxy.cluster.topic_directory import KEPT_FOR_MS, MAX_TOPICS
from proxy.cluster.topology import Topology
from proxy.wire.context import Address, Endpoint
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import Broker, ClusterMetadata, TopicMetadata
from tiers.errors import BrokerError, BrokerRefusedError

ANOTHER_CLOCK_MS = 10**9
"""The client has another clock than the topology, as after a suspend of the machine."""
ADDRESSES = ListenerAddresses("0.0.0.0", "proxy.example", 9092, 9100)


class ScriptedClient:
    """Answers Metadata with what the test says, at the time of the test's clock."""

    def __init__(self) -> None:
        self.addresses: dict[int, Address] = {}
        self.topics: dict[str, UUID] = {}
        self.said_by: dict[int | None, dict[str, UUID]] = {}
        """The topics that one broker knows otherwise."""
        self.dead: set[int | None] = set()
        self.now_ms = 0
        self.reads = 0
        self.asked: list[list[str]] = []
        """The names in each request."""
        self.was_asked = asyncio.Event()
        self.is_slow: asyncio.Event | None = None
        self.trouble: str | None = None
        self.refuses = False
        self.code: int | None = None

    async def brokers(self, max_age_ms: int = 0, timeout_ms: int | None = None) -> ClusterMetadata:
        return await self.named(())

    async def named(
        self,
        names: Collection[str],
        ids: Collection[UUID] = (),
        timeout_ms: int | None = None,
        *,
        node_id: int | None = None,
    ) -> ClusterMetadata:
        self.reads += 1
        if node_id in self.dead:
            raise BrokerError("it is dead", retriable=True)
        self.asked.append(sorted(names))
        asked_at_ms = self.now_ms
        self.was_asked.set()
        if self.is_slow is not None:
            await self.is_slow.wait()
        if self.trouble is not None and self.refuses:
            raise BrokerRefusedError(self.trouble)
        if self.trouble is not None:
            raise BrokerError(self.trouble, self.code, retriable=True)
        topics = {
            name: TopicMetadata(name, topic_id, {})
            for name, topic_id in (self.topics | self.said_by.get(node_id, {})).items()
            if name in names or topic_id in ids
        }
        return ClusterMetadata(
            "cluster",
            1,
            {node_id: Broker(node_id, *address) for node_id, address in self.addresses.items()},
            topics,
            asked_at_ms + ANOTHER_CLOCK_MS,
            {topic.topic_id: topic for topic in topics.values()},
        )


class Rig:
    def __init__(self, addresses: ListenerAddresses = ADDRESSES) -> None:
        self.client = ScriptedClient()
        self.listeners: dict[int, Endpoint] = {}
        self.taken_ports: set[int] = set()
        self.topology = Topology(
            cast(BrokerClient, self.client),
            [("boot", 1)],
            [(addresses, self.listen)],
            clock_ms=lambda: self.client.now_ms,
            own_topics=["own"],
            refresh_interval_ms=60_000,
        )

    def advertised(self, node_id: int) -> Address:
        return self.topology.listeners[0].advertised_address(node_id)

    def listen(self, host: str, port: int, endpoint: Endpoint) -> None:
        if port in self.taken_ports:
            raise OSError("address already in use")
        self.listeners[port] = endpoint


async def test_every_broker_has_a_listener_that_follows_it() -> None:
    rig = Rig()
    rig.client.addresses = {1: ("a", 9), 7: ("b", 9)}
    readiness = [rig.topology.is_ready]
    assert await rig.topology.refresh()
    assert [*readiness, rig.topology.is_ready] == [False, True]
    assert [rig.advertised(node_id) for node_id in (1, 7)] == [("proxy.example", 9101), ("proxy.example", 9107)]
    rig.client.addresses[1] = ("c", 10)
    await rig.topology.refresh()
    rig.client.trouble = "down"
    assert not await rig.topology.refresh()
    assert rig.topology.trouble == "down"
    found = {port: endpoint.addresses() for port, endpoint in rig.listeners.items()}
    assert found == {9101: (("c", 10),), 9107: (("b", 9),)}


async def test_a_broker_in_a_relayed_answer_gets_a_listener_at_once() -> None:
    rig = Rig()
    rig.client.addresses = {1: ("a", 9)}
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(rig.topology.run())
        await rig.topology.wait_until_ready()
        rig.client.addresses[2] = ("b", 9)
        assert rig.advertised(2) == ("proxy.example", 9102)
        endpoint = rig.listeners[9102]
        assert endpoint.addresses() == ()
        async with asyncio.timeout(60):
            while not endpoint.addresses():  # noqa: ASYNC110 - a look-up has no event
                await asyncio.sleep(0)
        assert endpoint.addresses() == (("b", 9),)
        following.cancel()


async def test_the_bootstrap_port_leads_to_any_broker() -> None:
    rig = Rig()
    rig.topology.listen_for_bootstrap()
    assert rig.listeners[9092].node_id is None
    assert rig.listeners[9092].addresses() == (("boot", 1),)
    rig.client.addresses = {1: ("a", 9)}
    await rig.topology.refresh()
    assert rig.listeners[9092].addresses() == (("boot", 1), ("a", 9))


async def test_a_broker_whose_port_is_taken_is_advertised_at_no_address(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.taken_ports = {9101}
    rig.client.addresses = {1: ("a", 9), 2: ("b", 9)}
    for _ in range(3):
        await rig.topology.refresh()
        assert rig.advertised(1) == ("broker-1-has-no-listener.invalid", 9)
    assert rig.advertised(2) == ("proxy.example", 9102)
    assert rig.topology.unserved == ["broker 1 has no listener: address already in use"]
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    rig.client.addresses = {2: ("b", 9)}
    await rig.topology.refresh()
    assert rig.topology.unserved == [], "a broker that left the cluster needs no listener"
    rig.client.addresses[1], rig.taken_ports = ("a", 9), set()
    await rig.topology.refresh()
    assert list(rig.listeners) == [9102, 9101]
    assert rig.topology.unserved == []
    assert rig.advertised(1) == ("proxy.example", 9101)


@pytest.mark.parametrize(
    ("node_id", "reason"),
    [
        (65_535, "port 74635 does not exist, and no listener.base.port fits node id 65535"),
        (100, "port 9200 is listener.bootstrap.port: change that setting or listener.base.port"),
    ],
)
async def test_a_port_that_the_settings_make_impossible_is_named(node_id: int, reason: str) -> None:
    rig = Rig(ListenerAddresses("0.0.0.0", "proxy.example", 9200, 9100))
    rig.client.addresses = {1: ("a", 9), node_id: ("b", 9)}
    await rig.topology.refresh()
    (unserved,) = rig.topology.unserved
    assert unserved.startswith(f"broker {node_id} has no listener: {reason}")
    assert rig.advertised(node_id)[0].endswith(".invalid")


async def test_topic_ids_have_an_age() -> None:
    rig = Rig()
    rig.client.topics = {"t": UUID(int=7)}
    rig.topology.topics.use_topic("t")
    assert rig.topology.topics.topic_id("t") is None
    await rig.topology.refresh()
    rig.client.now_ms = 1_000
    assert rig.topology.topics.topic_id("t") == UUID(int=7)
    assert rig.topology.topics.topic_id("t", max_age_ms=999) is None
    assert rig.topology.topics.topic_name(UUID(int=7)) == "t"
    rig.client.topics = {"t": UUID(int=8)}
    assert await rig.topology.topics.resolve_topic_id("t", 999, 1_000) == UUID(int=8)
    assert rig.topology.topics.topic_name(UUID(int=7)) is None
    reads = rig.client.reads
    assert await rig.topology.topics.resolve_topic_id("t", 999, 1_000) == UUID(int=8)
    assert rig.client.reads == reads
    rig.client.trouble = "down"
    rig.client.now_ms = 5_000
    assert await rig.topology.topics.resolve_topic_id("t", 999, 1_000) is None


async def test_the_name_of_a_topic_is_asked_for_once() -> None:
    rig = Rig()
    rig.client.topics = {"t": UUID(int=7)}
    assert await rig.topology.topics.resolve_topic_name(UUID(int=7), 1_000) == "t"
    reads = rig.client.reads
    assert await rig.topology.topics.resolve_topic_name(UUID(int=7), 1_000) == "t"
    assert rig.client.reads == reads
    assert await rig.topology.topics.resolve_topic_name(UUID(int=8), 1_000) is None
    rig.client.trouble = "down"
    assert await rig.topology.topics.resolve_topic_name(UUID(int=7), 1_000) == "t"
    with pytest.raises(BrokerError):
        await rig.topology.topics.resolve_topic_name(UUID(int=8), 1_000)


async def test_a_refresh_names_the_topics_that_a_broker_has_answered_for() -> None:
    rig = Rig()
    rig.client.topics = {"own": UUID(int=1), "t": UUID(int=7), "u": UUID(int=8)}
    await rig.topology.refresh()
    assert rig.topology.topics.topic_name(UUID(int=1)) == "own"
    assert rig.topology.topics.topic_name(UUID(int=7)) is None
    rig.topology.topics.use_topic("t")
    await rig.topology.refresh()
    assert rig.topology.topics.topic_id("t") == UUID(int=7)
    assert await rig.topology.topics.resolve_topic_id("u", 0, 1_000) == UUID(int=8)
    assert rig.client.asked == [["own"], ["own", "t"], ["u"]]


async def test_a_topic_that_is_not_used_is_forgotten() -> None:
    rig = Rig()
    rig.client.topics = {"own": UUID(int=1), "t": UUID(int=7), "u": UUID(int=8), "v": UUID(int=9)}
    for name in ("t", "u", "v"):
        await rig.topology.topics.resolve_topic_id(name, 0, 1_000)
    rig.client.now_ms = KEPT_FOR_MS
    rig.topology.topics.use_topic("u")
    rig.topology.topics.use_topic(UUID(int=9))
    rig.client.now_ms += 1
    assert rig.topology.topics.topic_id("t") == UUID(int=7), "a look at what is known is no use of a topic"
    await rig.topology.refresh()
    assert rig.client.asked[-1] == ["own", "u", "v"]
    assert rig.topology.topics.topic_name(UUID(int=7)) is None


async def test_a_name_that_is_only_looked_up_pushes_out_no_topic() -> None:
    rig = Rig()
    rig.client.topics = {"own": UUID(int=1), "t": UUID(int=7)}
    await rig.topology.topics.resolve_topic_id("t", 0, 1_000)
    for number in range(MAX_TOPICS):
        assert rig.topology.topics.topic_id(f"made-up-{number}") is None
    await rig.topology.refresh()
    assert rig.client.asked[-1] == ["own", "t"]
    for number in range(2 * MAX_TOPICS):
        rig.topology.topics.use_topic(f"topic-{number}")
    await rig.topology.refresh()
    assert len(rig.client.asked[-1]) == MAX_TOPICS
    assert rig.topology.topics.topic_name(UUID(int=1)) == "own"


async def test_no_broker_is_asked_for_a_name_that_no_topic_can_have() -> None:
    rig = Rig()
    for name in ("", "a b", "a" * 250, "a" * 40_000):
        assert await rig.topology.topics.resolve_topic_id(name, 0, 1_000) is None
    await rig.topology.refresh()
    assert rig.client.asked == [["own"]]


async def test_callers_that_wait_for_topics_share_a_request() -> None:
    rig = Rig()
    rig.client.topics = {name: UUID(int=number) for number, name in enumerate("abcd", 1)}
    rig.client.is_slow = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(rig.topology.topics.resolve_topic_id(name, 0, 1_000)) for name in "abcdbx"]
        await rig.client.was_asked.wait()
        rig.client.now_ms = 5
        rig.client.is_slow.set()
    assert [one.result() for one in found] == [*(UUID(int=number) for number in (1, 2, 3, 4, 2)), None]
    assert rig.client.asked == [["a"], ["b", "c", "d", "x"]]


async def test_every_broker_that_answers_is_asked_for_former_topics() -> None:
    rig = Rig()
    rig.client.addresses = {1: ("a", 9), 2: ("b", 9), 3: ("c", 9)}
    rig.client.topics = {"t": UUID(int=7)}
    rig.client.said_by = {2: {"t": UUID(int=6)}}
    rig.client.dead = {3}
    assert await rig.topology.topics.all_topic_ids(["t", "u"], 1_000) == {"t": {UUID(int=6), UUID(int=7)}, "u": set()}
    rig.client.dead = {1, 2, 3}
    with pytest.raises(BrokerError):
        await rig.topology.topics.all_topic_ids(["t"], 1_000)


async def test_brokers_that_are_silent_for_a_minute_are_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """The page shows them at once, and the log has an error after a minute: the only broker may restart."""
    rig = Rig()
    rig.client.trouble = "down"
    for now_ms, silence in (
        (0, None),
        (1_000, ("down", 1_000)),
        (60_000, ("down", 60_000)),
        (60_001, ("down", 60_001)),
    ):
        rig.client.now_ms = now_ms
        assert not await rig.topology.refresh()
        assert rig.topology.silence == silence
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["no broker has answered for a minute"]
    rig.client.refuses = True
    assert not await rig.topology.refresh()
    assert rig.topology.silence is None, "a broker that refuses the proxy answers"
    rig.client.refuses, rig.client.code = False, 35
    for now_ms in (100_000, 200_000):
        rig.client.now_ms = now_ms
        assert not await rig.topology.refresh()
    assert rig.topology.silence is None, "a broker that answers with an error answers"
    rig.client.code = None
    rig.client.trouble = None
    assert await rig.topology.refresh()
    rig.client.trouble = "down again"
    assert not await rig.topology.refresh()
    assert rig.topology.silence is None


async def test_brokers_that_do_not_answer_the_next_read_are_unreachable() -> None:
    rig = Rig()
    rig.client.now_ms = 1_000
    assert await rig.topology.refresh()
    rig.client.now_ms += 60_000 + 10_000 - 1  # the interval of the reads, and the deadline of one
    assert rig.topology.unreachable == []
    rig.client.now_ms += 1
    assert rig.topology.unreachable == ["no broker has answered for 70 s: no error so far"]
    rig.client.trouble = "down"
    assert not await rig.topology.refresh()
    assert rig.topology.unreachable == ["no broker has answered for 70 s: down"]
    rig.client.code = 35
    assert not await rig.topology.refresh()
    assert rig.topology.unreachable == [], "a broker that answers with an error answers"


async def test_a_refusal_is_final_only_before_the_first_success(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.client.trouble = "down"
    assert not await rig.topology.meet_cluster()
    rig.client.refuses = True
    with pytest.raises(BrokerRefusedError, match="down"):
        await rig.topology.meet_cluster()

    rig.client.trouble = None
    assert await rig.topology.meet_cluster()
    assert rig.topology.refusal is None
    rig.client.trouble = "no such user"
    caplog.clear()
    assert not await rig.topology.refresh()
    assert not await rig.topology.refresh()
    assert str(rig.topology.refusal) == "no such user"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", "the brokers reject the proxy: no such user")
    ]
    rig.client.trouble = None
    assert await rig.topology.refresh()
    assert rig.topology.refusal is None


async def test_clients_that_name_unknown_brokers_do_not_set_the_pace() -> None:
    rig = Rig()
    rig.client.addresses = {1: ("a", 9)}
    turns = 2_000
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(rig.topology.run())
        await rig.topology.wait_until_ready()
        for _ in range(turns):
            assert rig.topology.broker_addresses(7) == ()
            await asyncio.sleep(0)
        following.cancel()
    assert rig.client.reads < turns / 10


async def test_a_start_without_a_broker_says_that_no_port_is_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.client.trouble = "nothing listens there"

    async def sleep(delay_s: float) -> None:
        rig.client.now_ms += 1_000
        if rig.client.now_ms == 5_000:
            rig.client.trouble = None

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with caplog.at_level(logging.INFO):
        await rig.topology.wait_for_cluster()
    begins, ends = caplog.records
    assert "opens no port for clients before" in begins.getMessage()
    assert (vars(begins)["error"], ends.getMessage()) == ("nothing listens there", "a broker answers")
