"""A member of the owners' group declares its settings, and joins again when they change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from protocol.errors import ErrorCode
from tests.support.tiers.waiting import until
from tiers.broker.client import monotonic_ms
from tiers.metadata.topic.group.assignor import Assigned, decode_subscription, encode_assignment
from tiers.metadata.topic.group.membership import GroupMembership, MembershipSettings
from tiers.metadata.topic.metadata_topic import MetadataTopic


class Coordinator:
    """Stands for the client. Accepts everything, and keeps the settings of each join."""

    def __init__(self) -> None:
        self.declared: list[str] = []

    async def request(self, node_id: int | None, message: Any, timeout_ms: int, **options: object) -> SimpleNamespace:
        if type(message).__name__ == "JoinGroupRequest":
            self.declared.append(decode_subscription(message.protocols[0].metadata).settings)
        assigned = encode_assignment("topic", Assigned(frozenset({0}), frozenset()))
        return SimpleNamespace(
            error_code=ErrorCode.NONE, node_id=1, member_id="a", leader="b", generation_id=1, assignment=assigned
        )


async def test_a_member_joins_again_when_its_settings_change() -> None:
    coordinator, settings = Coordinator(), {"now": "[[topics]]=1"}
    member = GroupMembership(
        cast(Any, coordinator),
        MetadataTopic("cluster", "topic", UUID(int=9), 1, 86_400_000),
        MembershipSettings("group", heartbeat_interval_ms=1, declares=lambda: settings["now"]),
        clock_ms=monotonic_ms,
        on_assigned=lambda assignment: None,
        on_revoked=lambda: None,
    )
    running = asyncio.create_task(member.run())
    await until(lambda: member.is_confirmed(1_000))
    settings["now"] = "[[topics]]=2"
    await until(lambda: len(coordinator.declared) > 1)
    running.cancel()
    await asyncio.wait([running])
    assert coordinator.declared == ["[[topics]]=1", "[[topics]]=2"]
