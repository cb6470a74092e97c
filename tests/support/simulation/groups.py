"""The group coordinator: Kafka's classic protocol, as far as an owner of metadata partitions uses it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.consumer import (
    HeartbeatResponse,
    JoinGroupResponse,
    LeaveGroupResponse,
    SyncGroupResponse,
)

from protocol.errors import ErrorCode
from tests.support.simulation.loop import VirtualLoop

_FIRST_DELAY_S = 0.5
_MEMBER_ID_REQUIRED = 79


@dataclass
class _Member:
    metadata: bytes
    session_ms: int
    rebalance_ms: int
    seen_ms: int
    joining: asyncio.Future[Any] | None = None
    syncing: asyncio.Future[Any] | None = None
    assignment: bytes = b""


@dataclass
class _Group:
    generation: int = 0
    state: str = "Empty"
    leader: str = ""
    protocol_name: str = ""
    protocol_type: str = ""
    members: dict[str, _Member] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    """Until when (ms) the coordinator waits for the members that it named and that have not joined yet (KIP-394)."""
    timer: Any = None


class GroupCoordinator:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._groups: dict[str, _Group] = {}
        self._stale: dict[int, dict[str, tuple[int, set[str]]]] = {}
        self.confirmed_s: dict[str, float] = {}
        """When a client was last confirmed as a member of the present generation, by the client's id."""

    def split(self, node: int) -> None:
        """A coordinator that is cut off goes on confirming the generations that it knew."""
        self._stale[node] = {name: (one.generation, set(one.members)) for name, one in self._groups.items()}

    def heal(self, node: int) -> None:
        self._stale.pop(node, None)

    def stale_heartbeat(self, node: int, request: Any) -> Any | None:
        generation, members = self._stale.get(node, {}).get(request.group_id, (-1, set()))
        if generation != request.generation_id or request.member_id not in members:
            return None
        return HeartbeatResponse(throttle_time_ms=0, error_code=0)

    def check_member(self, group_id: str, generation: int, member_id: str) -> int:
        group = self._groups.setdefault(group_id, _Group())
        if member_id not in group.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if generation == group.generation else ErrorCode.ILLEGAL_GENERATION

    def members(self, group_id: str) -> set[str]:
        return set(self._groups.setdefault(group_id, _Group()).members)

    def join(self, request: Any) -> Any:
        group = self._groups.setdefault(request.group_id, _Group())
        if request.session_timeout_ms < 6_000:
            return self._joined(group, ErrorCode.INVALID_SESSION_TIMEOUT, request.member_id, with_members=False)
        if not request.member_id:
            member_id = f"tidegate-{self._rng.getrandbits(64):016x}"
            group.named[member_id] = self._loop.now_ms + request.session_timeout_ms
            return self._joined(group, _MEMBER_ID_REQUIRED, member_id, with_members=False)
        member = group.members.get(request.member_id)
        metadata = bytes(request.protocols[0].metadata)
        is_same = member is not None and member.metadata == metadata
        if member is None:
            if group.named.pop(request.member_id, None) is None:
                return self._joined(group, ErrorCode.UNKNOWN_MEMBER_ID, request.member_id, with_members=False)
            member = _Member(metadata, request.session_timeout_ms, request.rebalance_timeout_ms, self._loop.now_ms)
            group.members[request.member_id] = member
        member.metadata, member.seen_ms = metadata, self._loop.now_ms
        is_leader = request.member_id == group.leader
        if is_same and (group.state == "CompletingRebalance" or (group.state == "Stable" and not is_leader)):
            # Nothing is new, so the member learns the present generation, and the others are left alone.
            with_members = is_leader and group.state == "CompletingRebalance"
            return self._joined(group, 0, request.member_id, with_members=with_members)
        group.protocol_name, group.protocol_type = request.protocols[0].name, request.protocol_type
        if member.joining is not None and not member.joining.done():
            member.joining.set_result(
                self._joined(group, ErrorCode.UNKNOWN_MEMBER_ID, request.member_id, with_members=False)
            )
        joining = member.joining = self._loop.create_future()
        was_empty = group.state == "Empty"
        if group.state != "PreparingRebalance":
            self._prepare(group, _FIRST_DELAY_S if was_empty else member.rebalance_ms / 1000)
        if not was_empty:
            self._complete_when_all_joined(group)
        return joining

    def _prepare(self, group: _Group, delay_s: float) -> None:
        if group.state == "CompletingRebalance":
            for member in group.members.values():
                if member.syncing is not None and not member.syncing.done():
                    member.syncing.set_result(self._synced(ErrorCode.REBALANCE_IN_PROGRESS, group, b""))
        group.state = "PreparingRebalance"
        if group.timer is not None:
            group.timer.cancel()
        group.timer = self._loop.later(delay_s, self._complete, group)

    def _complete_when_all_joined(self, group: _Group) -> None:
        if not group.named and all(member.joining is not None for member in group.members.values()):
            self._complete(group)

    def _complete(self, group: _Group) -> None:
        if group.state != "PreparingRebalance":
            return
        if group.timer is not None:
            group.timer.cancel()
        group.members = {name: one for name, one in group.members.items() if one.joining is not None}
        group.generation += 1
        if not group.members:
            group.state = "Empty"
            return
        group.state = "CompletingRebalance"
        if group.leader not in group.members:
            group.leader = next(iter(group.members))
        for name, member in group.members.items():
            member.seen_ms, member.assignment = self._loop.now_ms, b""
            joining, member.joining, member.syncing = member.joining, None, None
            if joining is not None and not joining.done():
                joining.set_result(self._joined(group, 0, name, with_members=name == group.leader))

    def _joined(self, group: _Group, code: int, member_id: str, *, with_members: bool) -> Any:
        member = JoinGroupResponse.JoinGroupResponseMember
        return JoinGroupResponse(
            throttle_time_ms=0,
            error_code=code,
            generation_id=group.generation if code == 0 else -1,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            leader=group.leader if code == 0 else "",
            skip_assignment=False,
            member_id=member_id,
            members=[
                member(member_id=name, group_instance_id=None, metadata=one.metadata)
                for name, one in group.members.items()
                if with_members
            ],
        )

    def sync(self, request: Any, client: str) -> Any:
        group = self._groups.setdefault(request.group_id, _Group())
        code = self.check_member(request.group_id, request.generation_id, request.member_id)
        if code:
            return self._synced(code, group, b"")
        member = group.members[request.member_id]
        member.seen_ms = self._loop.now_ms
        self.confirmed_s[client] = self._loop.time()
        if group.state == "PreparingRebalance":
            return self._synced(ErrorCode.REBALANCE_IN_PROGRESS, group, b"")
        if group.state == "Stable":
            return self._synced(0, group, member.assignment)
        member.syncing = self._loop.create_future()
        waiting = member.syncing
        if request.member_id == group.leader:
            group.state = "Stable"
            for one in request.assignments:
                if one.member_id in group.members:
                    group.members[one.member_id].assignment = bytes(one.assignment)
            for each in group.members.values():
                if each.syncing is not None and not each.syncing.done():
                    each.syncing.set_result(self._synced(0, group, each.assignment))
        return waiting

    def _synced(self, code: int, group: _Group, assignment: bytes) -> Any:
        return SyncGroupResponse(
            throttle_time_ms=0,
            error_code=code,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            assignment=assignment,
        )

    def heartbeat(self, request: Any, client: str) -> Any:
        group = self._groups.setdefault(request.group_id, _Group())
        code = self.check_member(request.group_id, request.generation_id, request.member_id)
        if not code:
            group.members[request.member_id].seen_ms = self._loop.now_ms
            self.confirmed_s[client] = self._loop.time()
            if group.state == "PreparingRebalance":
                code = ErrorCode.REBALANCE_IN_PROGRESS
        return HeartbeatResponse(throttle_time_ms=0, error_code=code)

    def rebalance(self) -> None:
        """Begins a new generation of every group, as a member does that joins and leaves again."""
        for group in self._groups.values():
            if group.state == "Stable":
                self._prepare(group, max(one.rebalance_ms for one in group.members.values()) / 1000)

    def leave(self, request: Any) -> Any:
        answered = LeaveGroupResponse.MemberResponse
        group = self._groups.setdefault(request.group_id, _Group())
        members = []
        for member in request.members:
            code = ErrorCode.NONE
            if member.member_id in group.named:
                self._forget_named(group, member.member_id)
            elif not self._remove(group, member.member_id):
                code = ErrorCode.UNKNOWN_MEMBER_ID
            members.append(answered(member_id=member.member_id, group_instance_id=None, error_code=code))
        return LeaveGroupResponse(throttle_time_ms=0, error_code=0, members=members)

    def expire(self) -> None:
        """Ends the sessions of members that were not heard of."""
        for group in self._groups.values():
            for name in [name for name, until_ms in group.named.items() if until_ms < self._loop.now_ms]:
                self._forget_named(group, name)
            for name, member in list(group.members.items()):
                is_waiting = member.joining is not None
                if not is_waiting and self._loop.now_ms - member.seen_ms > member.session_ms:
                    self._remove(group, name)

    def _forget_named(self, group: _Group, name: str) -> None:
        del group.named[name]
        if group.state == "PreparingRebalance" and group.members:
            self._complete_when_all_joined(group)

    def _remove(self, group: _Group, name: str) -> bool:
        """Returns whether the group had the member."""
        if group.members.pop(name, None) is None:
            return False
        if not group.members:
            group.state, group.generation = "Empty", group.generation + 1
        elif group.state == "PreparingRebalance":
            self._complete_when_all_joined(group)
        else:
            longest_ms = max(one.rebalance_ms for one in group.members.values())
            self._prepare(group, longest_ms / 1000)
        return True
