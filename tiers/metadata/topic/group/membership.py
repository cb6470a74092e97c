"""`GroupMembership` is one member of the consumer group that shares the metadata partitions, for ownership only.

It speaks Kafka's classic group protocol, eager: a member that sees a rebalance gives up all partitions, and then owns
those that the new generation assigns to it. `is_confirmed` uses the time of the last heartbeat that the coordinator
answered for the current generation (docs/design.md, safety rule 4). If the coordinator cannot be reached, the member
keeps its generation until the coordinator ends it.

A member declares with each join whether it is fit, and its settings. It joins again when that changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kafka.protocol.consumer import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest

from protocol.errors import ErrorCode
from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.lasting_trouble import LastingTrouble
from tiers.metadata.records.serde import RecordType, known_record_types
from tiers.metadata.topic.group.assignor import (
    PROTOCOL_NAME,
    PROTOCOL_TYPE,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignments,
    encode_subscription,
)
from tiers.metadata.topic.metadata_producer import GROUP_COORDINATOR, GroupMember, find_coordinator
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import TopicBasedSettings

logger = logging.getLogger(__name__)

_LANE = "remote-log-metadata-group"
_JOIN_LANE = "remote-log-metadata-join"
_SESSION_TIMEOUT_MS = 6_000
"""The shortest timeout that brokers accept by default. A dead owner's partitions have no owner for that long, or for
twice as long with a second dead member, and ownership must be back within 15 s. If brokers demand longer sessions
(`group.min.session.timeout.ms`), the member doubles the timeout until they accept it."""
_REBALANCE_TIMEOUT_MS = 6_000
_HEARTBEAT_INTERVAL_MS = 1_000
_HEARTBEAT_TIMEOUT_MS = 1_500
_REQUEST_TIMEOUT_MS = 5_000
_LEAVE_TIMEOUT_MS = 3_000
_BACKOFF = Backoff(base_ms=50, cap_ms=1_000)
_LONGEST_SESSION_TIMEOUT_MS = 384_000
"""Six doublings of the default. If the brokers demand longer sessions, the member reports an error."""


@dataclass(frozen=True, slots=True)
class Assignment:
    member: GroupMember
    metadata_partitions: frozenset[int]
    record_types: frozenset[RecordType]
    """The record types that every member of the generation reads."""


class _RejoinError(Exception):
    """The generation is over."""


class GroupMembership:
    """A member of the group. It calls `on_assigned` and `on_revoked` alternately, in the loop; neither may block."""

    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        settings: TopicBasedSettings,
        *,
        clock_ms: Callable[[], int],
        on_assigned: Callable[[Assignment], None],
        on_revoked: Callable[[], None],
    ) -> None:
        self._client = client
        self._topic = topic
        self._settings = settings
        self._clock_ms = clock_ms
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._declared: tuple[bool, str] = (True, "")
        self._session_timeout_ms = _SESSION_TIMEOUT_MS
        self._coordinator: int | None = None
        self._member_id = ""
        self._generation_id = -1
        self._owned: frozenset[int] = frozenset()
        self._confirmed_at_ms: int | None = None
        self._rejoin = asyncio.Event()
        self._no_group = LastingTrouble(logger, "the group cannot be joined", "the group was joined", clock_ms=clock_ms)
        self._no_heartbeat = LastingTrouble(
            logger, "a heartbeat failed", "the coordinator answers heartbeats again", clock_ms=clock_ms
        )

    def is_confirmed(self, max_age_ms: int) -> bool:
        """Returns whether the coordinator confirmed this member's generation at most `max_age_ms` ago."""
        return self._confirmed_at_ms is not None and self._clock_ms() - self._confirmed_at_ms <= max_age_ms

    def rejoin(self) -> None:
        """Asks the group for a new generation, and so for a new assignment."""
        self._rejoin.set()

    async def run(self) -> None:
        """Is a member until cancelled. Then it leaves the group, so that the others do not wait for its session."""
        failures = 0
        try:
            while True:
                try:
                    assignment = await self._join()
                    failures = 0
                    self._no_group.ended()
                    await self._hold(assignment)
                except _RejoinError as reason:
                    logger.info("this member joins the group again", extra={"reason": str(reason)})
                    continue
                except (BrokerError, RemoteLogMetadataError) as error:
                    self._coordinator = None
                    self._no_group.found(error=str(error))
                    failures += 1
                    await asyncio.sleep(_BACKOFF.pause_ms(failures) / 1000)
        finally:
            await self._leave()

    async def _hold(self, assignment: Assignment) -> None:
        """Sends heartbeats while the generation lasts. Always ends with an exception."""
        self._rejoin.clear()
        self._owned = assignment.metadata_partitions
        self._on_assigned(assignment)
        try:
            while True:
                await self._heartbeat()
                if self._facts() != self._declared:
                    raise _RejoinError("the fitness or the settings of this process changed")
                try:
                    async with asyncio.timeout(_HEARTBEAT_INTERVAL_MS / 1000):
                        await self._rejoin.wait()
                    raise _RejoinError("this process asked for a new assignment")
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
            self._no_heartbeat.found(error=str(error))
            self._coordinator = None
            return
        match response.error_code:
            case ErrorCode.NONE:
                self._confirmed_at_ms = sent_at_ms
                self._no_heartbeat.ended()
            case ErrorCode.REBALANCE_IN_PROGRESS:
                raise _RejoinError("the group rebalances")
            case ErrorCode.ILLEGAL_GENERATION | ErrorCode.UNKNOWN_MEMBER_ID | ErrorCode.FENCED_INSTANCE_ID as code:
                self._forget(code)
                raise _RejoinError("the group continued without this member")
            case code:
                self._no_heartbeat.found(error_code=code)
                self._coordinator = None

    def _forget(self, code: int) -> None:
        """Forgets this member's partitions: the group continued without it, and may have assigned them to others."""
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
        # The followers wait here until the group's leader has assigned the partitions.
        timeout_ms = _REBALANCE_TIMEOUT_MS + _REQUEST_TIMEOUT_MS
        sent_at_ms = self._clock_ms()
        sync = await self._client.request(await self._find_coordinator(), message, timeout_ms, lane=_JOIN_LANE)
        if sync.error_code != ErrorCode.NONE:
            self._raise_for("SyncGroup", sync.error_code)
        self._confirmed_at_ms = sent_at_ms
        return Assignment(
            GroupMember(self._settings.group_id, self._generation_id, self._member_id),
            *decode_assignment(sync.assignment, self._topic.name),
        )

    def _facts(self) -> tuple[bool, str]:
        fitness = self._settings.fitness
        return fitness is None or fitness.is_fit, self._settings.declares()

    async def _join_group(self) -> Any:
        self._declared = self._facts()
        subscription = Subscription(self._owned, self._settings.claims, known_record_types(), *self._declared)
        message = JoinGroupRequest(
            group_id=self._settings.group_id,
            session_timeout_ms=self._session_timeout_ms,
            rebalance_timeout_ms=_REBALANCE_TIMEOUT_MS,
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
        timeout_ms = _REBALANCE_TIMEOUT_MS + _REQUEST_TIMEOUT_MS
        # From version 4 on, the coordinator names a member before the member counts (KIP-394). So a lost response
        # leaves no orphaned member behind.
        return await self._client.request(
            await self._find_coordinator(), message, timeout_ms, min_version=4, lane=_JOIN_LANE
        )

    def _ask_for_longer_sessions(self) -> None:
        """Doubles the session timeout, and always raises.

        A longer session is safe: each heartbeat confirms the ownership, and nothing relies on the session alone."""
        refused_ms, self._session_timeout_ms = self._session_timeout_ms, self._session_timeout_ms * 2
        if self._session_timeout_ms > _LONGEST_SESSION_TIMEOUT_MS:
            self._session_timeout_ms = _SESSION_TIMEOUT_MS
            raise BrokerError(
                f"the brokers accept no session timeout from {self._session_timeout_ms} to {refused_ms} ms: lower their"
                " group.min.session.timeout.ms, or raise their group.max.session.timeout.ms",
                ErrorCode.INVALID_SESSION_TIMEOUT,
                retriable=True,
            )
        logger.warning(
            "the brokers' group.min.session.timeout.ms demands longer sessions: a dead owner is replaced later",
            extra={"refused_ms": refused_ms, "session_timeout_ms": self._session_timeout_ms},
        )
        raise _RejoinError(f"the brokers refuse a session timeout of {refused_ms} ms")

    def _raise_for(self, what: str, code: int) -> None:
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION, ErrorCode.FENCED_INSTANCE_ID):
            self._forget(code)
        elif code == ErrorCode.REBALANCE_IN_PROGRESS:
            raise _RejoinError("the group rebalances")
        raise BrokerError(f"{what} of group {self._settings.group_id} failed", code, retriable=True)

    async def _leave(self) -> None:
        if not self._member_id or self._coordinator is None:
            return
        member = LeaveGroupRequest.MemberIdentity(member_id=self._member_id, group_instance_id=None, reason=None)
        message = LeaveGroupRequest(group_id=self._settings.group_id, member_id=self._member_id, members=[member])
        try:
            await self._client.request(self._coordinator, message, _LEAVE_TIMEOUT_MS, lane=_LANE)
        except BrokerError as error:
            logger.info(
                "the group could not be told that this member leaves: it waits for the session to end",
                extra={"error": str(error)},
            )
