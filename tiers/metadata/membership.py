"""`GroupMembership`: one member of the group whose members share the metadata partitions. For ownership only.

Kafka's classic group protocol, eager: whoever sees a rebalance gives up everything first, and owns again what the new
generation assigns. A heartbeat goes out every second; `confirmed_at_ms` is when the last one left that the coordinator
answered for the current generation (safety rule 4: an owner acts only while that is less than 2 s ago). Trouble with
the coordinator alone gives nothing up: the generation is still ours until the coordinator says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kafka.protocol.consumer import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.metadata.assignor import (
    PROTOCOL_NAME,
    PROTOCOL_TYPE,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignments,
    encode_subscription,
)
from tiers.metadata.metadata_producer import GROUP_COORDINATOR, GroupMember, find_coordinator
from tiers.metadata.metadata_topic import MetadataTopic
from tiers.metadata.record_types import FIRST_RECORD_TYPES
from tiers.metadata.serde import RecordType, known_record_types

log = logging.getLogger(__name__)

_LANE = "remote-log-metadata-group"
_JOIN_LANE = "remote-log-metadata-join"
_HEARTBEAT_TIMEOUT_MS = 1_500
_REQUEST_TIMEOUT_MS = 5_000
_LEAVE_TIMEOUT_MS = 3_000
_BACKOFF_CAP_MS = 1_000
_LONGEST_SESSION_TIMEOUT_MS = 384_000
"""Six doublings of the default: who asks for longer sessions than that is told so."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    group_id: str
    session_timeout_ms: int = 6_000
    """The shortest that brokers take by default. For so long a dead owner's partitions have none; a group that waits
    for a second dead member may take twice as long, and ownership is to be back within 15 s. Brokers may be set to take
    only longer ones (`group.min.session.timeout.ms`): then it is doubled until they do."""
    rebalance_timeout_ms: int = 6_000
    heartbeat_interval_ms: int = 1_000
    claims: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    member: GroupMember
    metadata_partitions: frozenset[int]
    record_types: frozenset[RecordType] = FIRST_RECORD_TYPES
    """The record types that every member of the generation reads."""


class _RejoinError(Exception):
    """The generation is over."""


class GroupMembership:
    """`on_assigned` and `on_revoked` are called in turn, from the loop; neither may block."""

    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        settings: MembershipSettings,
        *,
        clock_ms: Callable[[], int],
        on_assigned: Callable[[Assignment], None],
        on_revoked: Callable[[], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._topic = topic
        self._settings = settings
        self._clock_ms = clock_ms
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._jitter = jitter
        self._session_timeout_ms = settings.session_timeout_ms
        self._coordinator: int | None = None
        self._member_id = ""
        self._generation_id = -1
        self._owned: frozenset[int] = frozenset()
        self._confirmed_at_ms: int | None = None
        self._rejoin = asyncio.Event()

    def is_confirmed(self, max_age_ms: int) -> bool:
        """Whether the coordinator knew this member, in the generation of its assignment, at most so long ago."""
        return self._confirmed_at_ms is not None and self._clock_ms() - self._confirmed_at_ms <= max_age_ms

    def rejoin(self) -> None:
        """Asks for a new generation, hence for a new assignment."""
        self._rejoin.set()

    async def run(self) -> None:
        """A member until cancelled; then it leaves the group, so that the others need not wait for its session."""
        failures = 0
        try:
            while True:
                try:
                    assignment = await self._join()
                    failures = 0
                    await self._hold(assignment)
                except _RejoinError as reason:
                    log.info("the group is joined again", extra={"reason": str(reason)})
                    continue
                except (BrokerError, RemoteLogMetadataError) as error:
                    self._coordinator = None
                    log.warning("the group cannot be joined", extra={"error": str(error)})
                    cap_ms = min(_BACKOFF_CAP_MS, 50 << min(failures, 10))
                    await asyncio.sleep(cap_ms * self._jitter() / 1000)
                    failures += 1
        finally:
            await self._leave()

    async def _hold(self, assignment: Assignment) -> None:
        """Heartbeats for as long as the generation lasts; always ends with an exception."""
        self._rejoin.clear()
        self._owned = assignment.metadata_partitions
        self._on_assigned(assignment)
        try:
            while True:
                await self._heartbeat()
                try:
                    async with asyncio.timeout(self._settings.heartbeat_interval_ms / 1000):
                        await self._rejoin.wait()
                    raise _RejoinError("a new assignment is wanted")
                except TimeoutError:
                    continue
        finally:
            self._confirmed_at_ms = None
            self._on_revoked()

    async def _heartbeat(self) -> None:
        sent_at_ms = self._clock_ms()
        message = HeartbeatRequest(
            group_id=self._settings.group_id,
            generation_id=self._generation_id,
            member_id=self._member_id,
            group_instance_id=None,
        )
        try:
            node_id = await self._find_coordinator()
            response = await self._client.request(node_id, message, _HEARTBEAT_TIMEOUT_MS, lane=_LANE)
        except BrokerError as error:
            log.warning("a heartbeat failed", extra={"error": str(error)})
            self._coordinator = None
            return
        match response.error_code:
            case ErrorCode.NONE:
                self._confirmed_at_ms = sent_at_ms
            case ErrorCode.REBALANCE_IN_PROGRESS:
                raise _RejoinError("members come or go")
            case ErrorCode.ILLEGAL_GENERATION | ErrorCode.UNKNOWN_MEMBER_ID | ErrorCode.FENCED_INSTANCE_ID as code:
                self._forget(code)
                raise _RejoinError("the group went on without this member")
            case code:
                log.warning("a heartbeat was not answered well", extra={"error_code": code})
                self._coordinator = None

    def _forget(self, code: int) -> None:
        """The group went on without us: what we owned may be somebody else's."""
        self._owned = frozenset()
        self._generation_id = -1
        if code != ErrorCode.ILLEGAL_GENERATION:
            self._member_id = ""

    async def _find_coordinator(self) -> int:
        if self._coordinator is None:
            self._coordinator = await find_coordinator(
                self._client, self._settings.group_id, GROUP_COORDINATOR, _HEARTBEAT_TIMEOUT_MS
            )
        return self._coordinator

    async def _join(self) -> Assignment:
        response = await self._join_group()
        if response.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = response.member_id
            response = await self._join_group()
        if response.error_code == ErrorCode.INVALID_SESSION_TIMEOUT:
            self._ask_for_longer_sessions()
        if response.error_code != ErrorCode.NONE:
            self._raise_for("JoinGroup", response.error_code)
        self._member_id, self._generation_id = response.member_id, response.generation_id
        assignments: list[Any] = []
        if response.leader == self._member_id:
            members = {member.member_id: decode_subscription(member.metadata) for member in response.members}
            assignments = [
                SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)
                for member_id, assignment in encode_assignments(
                    self._topic.name, self._topic.partition_count, members
                ).items()
            ]
        message = SyncGroupRequest(
            group_id=self._settings.group_id,
            generation_id=self._generation_id,
            member_id=self._member_id,
            group_instance_id=None,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=PROTOCOL_NAME,
            assignments=assignments,
        )
        # Followers wait here until the leader has decided.
        timeout_ms = self._settings.rebalance_timeout_ms + _REQUEST_TIMEOUT_MS
        sent_at_ms = self._clock_ms()
        sync = await self._client.request(await self._find_coordinator(), message, timeout_ms, lane=_JOIN_LANE)
        if sync.error_code != ErrorCode.NONE:
            self._raise_for("SyncGroup", sync.error_code)
        self._confirmed_at_ms = sent_at_ms
        return Assignment(
            GroupMember(self._settings.group_id, self._generation_id, self._member_id),
            *decode_assignment(sync.assignment, self._topic.name),
        )

    async def _join_group(self) -> Any:
        subscription = Subscription(self._owned, self._settings.claims, known_record_types())
        message = JoinGroupRequest(
            group_id=self._settings.group_id,
            session_timeout_ms=self._session_timeout_ms,
            rebalance_timeout_ms=self._settings.rebalance_timeout_ms,
            member_id=self._member_id,
            group_instance_id=None,
            protocol_type=PROTOCOL_TYPE,
            protocols=[
                JoinGroupRequest.JoinGroupRequestProtocol(
                    name=PROTOCOL_NAME, metadata=encode_subscription(self._topic.name, subscription)
                )
            ],
            reason=None,
        )
        timeout_ms = self._settings.rebalance_timeout_ms + _REQUEST_TIMEOUT_MS
        # The first version that names the member before it counts (KIP-394): no ghosts after a lost answer.
        return await self._client.request(
            await self._find_coordinator(), message, timeout_ms, min_version=4, lane=_JOIN_LANE
        )

    def _ask_for_longer_sessions(self) -> None:
        """Always raises. Nothing acts on the session alone: ownership is confirmed by each heartbeat."""
        refused_ms, self._session_timeout_ms = self._session_timeout_ms, self._session_timeout_ms * 2
        if self._session_timeout_ms > _LONGEST_SESSION_TIMEOUT_MS:
            self._session_timeout_ms = self._settings.session_timeout_ms
            raise BrokerError(
                f"the brokers take no session timeout from {self._session_timeout_ms} to {refused_ms} ms: set their"
                " group.min.session.timeout.ms lower, or their group.max.session.timeout.ms higher",
                ErrorCode.INVALID_SESSION_TIMEOUT,
                retriable=True,
            )
        log.warning(
            "the brokers' group.min.session.timeout.ms asks for longer sessions: a dead owner is replaced later",
            extra={"refused_ms": refused_ms, "session_timeout_ms": self._session_timeout_ms},
        )
        raise _RejoinError(f"a session timeout of {refused_ms} ms is not allowed")

    def _raise_for(self, what: str, code: int) -> None:
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION, ErrorCode.FENCED_INSTANCE_ID):
            self._forget(code)
        elif code == ErrorCode.REBALANCE_IN_PROGRESS:
            raise _RejoinError("members come or go")
        raise BrokerError(f"{what} of group {self._settings.group_id}", code, retriable=True)

    async def _leave(self) -> None:
        if not self._member_id or self._coordinator is None:
            return
        member = LeaveGroupRequest.MemberIdentity(member_id=self._member_id, group_instance_id=None, reason=None)
        message = LeaveGroupRequest(group_id=self._settings.group_id, member_id=self._member_id, members=[member])
        try:
            await self._client.request(self._coordinator, message, _LEAVE_TIMEOUT_MS, lane=_LANE)
        except BrokerError as error:
            log.info("the group was not told that this member leaves", extra={"error": str(error)})
