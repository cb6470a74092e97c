"""ListGroups: the share groups that this broker coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import ListGroupsRequest, ListGroupsResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = ListGroupsRequest
_Group = ListGroupsResponse.ListedGroup


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return ListGroupsResponse(
        throttle_time_ms=0,
        error_code=0,
        groups=[
            _Group(group_id=group.group_id, protocol_type="share", group_state=group.state, group_type="share")
            for group in broker.share_groups
        ],
    )


def failing(error_code: int) -> Any:
    def edit(response: Any) -> None:
        response.error_code, response.groups = error_code, []

    return edit
