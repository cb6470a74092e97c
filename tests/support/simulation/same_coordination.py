"""Random operations on a group and a transactional producer, and what coordinators answer to them.

As `same_answers.py`, for a simulated cluster and a real one. The members are named, since coordinators choose their
ids, and generations are counted from the first one. A coordinator also chooses the next leader of a group whose leader
left, and it answers a leader otherwise than the others. So the chosen member takes the name of the first one that is
left, and the other one takes its name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from kafka.protocol.consumer import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.metadata.topic.metadata_producer import GROUP_COORDINATOR, TRANSACTION_COORDINATOR, find_coordinator

_TIMEOUT_MS = 20_000
_SESSION_MS, _REBALANCE_MS, _TRANSACTION_MS = 300_000, 120_000, 600_000
"""No member and no transaction is given up, however slow the machine is."""
_MEMBER_ID_REQUIRED = 79
_CONCURRENT, _COORDINATOR_TROUBLE = 51, (14, 15, 16)
_TYPE, _PROTOCOL = "tidegate", "simulated"
NAMES = ("a", "b", "c")


class GroupOperation(NamedTuple):
    kind: str
    name: str = ""
    generation: int = 0
    """Added to the present generation."""
    flag: bool = False


def group_operations(seed: int, count: int) -> list[GroupOperation]:
    rng = random.Random(f"{seed}-group-operations")
    made = [GroupOperation("join", "a")]
    for _ in range(count - 1):
        kind = rng.choices(
            ["join", "leave", "stranger", "heartbeat", "sync", "begin", "add", "commit", "end", "zombie"],
            [3, 1, 1, 5, 2, 3, 4, 6, 3, 2],
        )[0]
        made.append(GroupOperation(kind, rng.choice(NAMES), rng.choice((0, 0, 0, -1, 1)), rng.random() < 0.5))
    return made


class AnsweringCoordinators:
    """Does the operations on a group that does not exist yet."""

    def __init__(self, client: BrokerClient, group_id: str, transactional_id: str, topic: str) -> None:
        self._client = client
        self._group_id = group_id
        self._transactional_id = transactional_id
        self._topic = topic
        self._ids: dict[str, str] = {}
        """The ids of the members, by name."""
        self._metadata = dict.fromkeys(NAMES, b"")
        self._changes = 0
        self._generation = -1
        self._first_generation: int | None = None
        self._producer = self._zombie = -1, -1

    async def answers(self, asked: Sequence[GroupOperation]) -> list[Any]:
        return [(one, await self._do(one)) for one in asked]

    async def _do(self, asked: GroupOperation) -> Any:
        match asked.kind:
            case "join":
                return await self._join(asked.name, is_changed=asked.flag)
            case "leave":
                return await self._leave(asked.name)
            case "stranger":
                return int((await self._join_group("a stranger", "an id that no coordinator gave")).error_code)
            case "heartbeat":
                return await self._heartbeat(asked.name, asked.generation)
            case "sync":
                return await self._sync(asked.name, self._generation + asked.generation, {})
            case "begin":
                return await self._begin()
            case "zombie":
                return None if self._zombie[0] < 0 else await self._commit(asked.name, 0, self._zombie)
            case _ if self._producer[0] < 0:
                return None
            case "add":
                return await self._add_offsets(self._producer)
            case "commit":
                return await self._commit(asked.name, asked.generation, self._producer)
            case _:
                return await self._end(asked.flag)

    # The group

    async def _ask_group(
        self, message: Any, name: str = "", *, min_version: int = 0, max_version: int | None = None
    ) -> Any:
        """Sends a request until the coordinator is there."""
        while True:
            node_id = await find_coordinator(self._client, self._group_id, GROUP_COORDINATOR, _TIMEOUT_MS)
            response = await self._client.request(
                node_id, message, _TIMEOUT_MS, lane=f"member-{name}", max_version=max_version
            )
            if getattr(response, "error_code", 0) not in _COORDINATOR_TROUBLE:
                return response
            await asyncio.sleep(0.05)

    async def _join_group(self, name: str, member_id: str | None = None) -> Any:
        message = JoinGroupRequest(
            group_id=self._group_id, session_timeout_ms=_SESSION_MS, rebalance_timeout_ms=_REBALANCE_MS,
            member_id=self._ids.get(name, "") if member_id is None else member_id, group_instance_id=None,
            protocol_type=_TYPE,
            protocols=[
                JoinGroupRequest.JoinGroupRequestProtocol(name=_PROTOCOL, metadata=self._metadata.get(name, b""))
            ],
            reason=None,
        )  # fmt: skip
        return await self._ask_group(message, name, min_version=4)

    async def _join(self, name: str, *, is_changed: bool) -> Any:
        """Lets a member join. The other members join again if the group rebalances."""
        others, named = [one for one in self._ids if one != name], None
        if is_changed:
            self._changes += 1
            self._metadata[name] = b"%d" % self._changes
        if name not in self._ids:
            response = await self._join_group(name)
            named = int(response.error_code)
            self._ids[name] = response.member_id
        joining = asyncio.create_task(self._join_group(name))
        beats = [await self._beats_until_rebalance(one, joining) for one in others]
        rejoining = [asyncio.create_task(self._join_group(one)) for one in others if not joining.done()]
        joined = [await joining, *[await one for one in rejoining]]
        return named, beats, await self._synced([name, *others][: len(joined)], joined)

    async def _beats_until_rebalance(self, name: str, joining: asyncio.Task[Any]) -> int:
        """Returns the last answer to the heartbeats of a member until the group rebalances, or has joined."""
        while True:
            code = await self._heartbeat(name, 0)
            if code or joining.done():
                return code
            await asyncio.sleep(0.02)

    async def _synced(self, names: list[str], joined: list[Any]) -> Any:
        """Lets members that have joined fetch their assignments. Returns what all of them were told."""
        codes = [int(one.error_code) for one in joined]
        if any(codes):
            return codes
        self._generation = joined[0].generation_id
        if self._first_generation is None:
            self._first_generation = self._generation
        known = {member_id: name for name, member_id in self._ids.items()}
        told = [sorted(known[each.member_id] for each in one.members) for one in joined if one.members]
        assignments = {self._ids[one]: f"for {one}".encode() for one in self._ids}
        syncs = await asyncio.gather(
            *(
                self._sync(name, one.generation_id, assignments if one.members else {})
                for name, one in zip(names, joined, strict=True)
            )
        )
        return self._generation - self._first_generation, told, syncs

    async def _sync(self, name: str, generation: int, assignments: dict[str, bytes]) -> Any:
        message = SyncGroupRequest(
            group_id=self._group_id, generation_id=generation, member_id=self._ids.get(name, "nobody"),
            group_instance_id=None, protocol_type=_TYPE, protocol_name=_PROTOCOL,
            assignments=[
                SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)
                for member_id, assignment in assignments.items()
            ],
        )  # fmt: skip
        response = await self._ask_group(message, name)
        return int(response.error_code), bytes(response.assignment)

    async def _heartbeat(self, name: str, generation: int) -> int:
        message = HeartbeatRequest(
            group_id=self._group_id,
            generation_id=self._generation + generation,
            member_id=self._ids.get(name, "nobody"),
            group_instance_id=None,
        )
        return int((await self._ask_group(message, "beats")).error_code)

    async def _leave(self, name: str) -> Any:
        member = LeaveGroupRequest.MemberIdentity(
            member_id=self._ids.pop(name, "nobody"), group_instance_id=None, reason=None
        )
        message = LeaveGroupRequest(group_id=self._group_id, member_id=member.member_id, members=[member])
        response = await self._ask_group(message, min_version=3)
        codes = int(response.error_code), [int(one.error_code) for one in response.members]
        if codes[1] != [0] or not self._ids:
            return codes
        beats = [await self._heartbeat(one, 0) for one in self._ids]
        joined = await asyncio.gather(*(self._join_group(one) for one in self._ids))
        if any(one.error_code for one in joined):
            return codes, beats, [int(one.error_code) for one in joined]
        self._name_leader(joined[0].leader)
        by_id = {one.member_id: one for one in joined}
        return codes, beats, await self._synced(list(self._ids), [by_id[one] for one in self._ids.values()])

    def _name_leader(self, leader: str) -> None:
        """Gives the leader the name of the first member. That one gets the leader's name."""
        first, present = next(iter(self._ids)), next(name for name, one in self._ids.items() if one == leader)
        ids, metadata = self._ids, self._metadata
        ids[first], ids[present] = ids[present], ids[first]
        metadata[first], metadata[present] = metadata[present], metadata[first]

    # The producer

    async def _ask_transactions(self, message: Any, max_version: int) -> int:
        while True:
            node_id = await find_coordinator(self._client, self._transactional_id, TRANSACTION_COORDINATOR, _TIMEOUT_MS)
            response = await self._client.request(node_id, message, _TIMEOUT_MS, max_version=max_version)
            if response.error_code not in (_CONCURRENT, *_COORDINATOR_TROUBLE):
                if isinstance(message, InitProducerIdRequest):
                    self._producer = response.producer_id, response.producer_epoch
                return int(response.error_code)
            await asyncio.sleep(0.05)

    async def _begin(self) -> int:
        before = self._producer
        message = InitProducerIdRequest(
            transactional_id=self._transactional_id,
            transaction_timeout_ms=_TRANSACTION_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        code = await self._ask_transactions(message, 4)
        self._zombie = before
        return code

    async def _add_offsets(self, producer: tuple[int, int]) -> int:
        message = AddOffsetsToTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=producer[0],
            producer_epoch=producer[1],
            group_id=self._group_id,
        )
        return await self._ask_transactions(message, 3)

    async def _end(self, committed: bool) -> int:
        message = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            committed=committed,
        )
        code = await self._ask_transactions(message, 3)
        # The coordinator answers before it writes the markers. It answers the same request again only after that.
        return code or await self._ask_transactions(message, 3)

    async def _commit(self, name: str, generation: int, producer: tuple[int, int]) -> int:
        """Commits an offset under the generation of a member (KIP-447)."""
        request = TxnOffsetCommitRequest
        partition = request.TxnOffsetCommitRequestTopic.TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=7, committed_leader_epoch=-1, committed_metadata=""
        )
        message = request(
            transactional_id=self._transactional_id, group_id=self._group_id, producer_id=producer[0],
            producer_epoch=producer[1], generation_id=self._generation + generation,
            member_id=self._ids.get(name, "nobody"), group_instance_id=None,
            topics=[request.TxnOffsetCommitRequestTopic(name=self._topic, partitions=[partition])],
        )  # fmt: skip
        while True:
            response = await self._ask_group(message, "commits", min_version=3, max_version=4)
            code = int(response.topics[0].partitions[0].error_code)
            if code not in (ErrorCode.CONCURRENT_TRANSACTIONS, *_COORDINATOR_TROUBLE):
                return code
            await asyncio.sleep(0.05)
