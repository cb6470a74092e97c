"""Guards the ids of the remote log's owners: clients may use neither their group nor their transactional ids.

See docs/semantics.md 9.5.

A client that initializes a producer with an owner's transactional id fences the owner. A member that joins the owners'
group, or commits offsets for it, takes their partitions away. The proxy itself refuses such a request with the error
that a broker gives to a client without the right. It reads only the ids at the head of a request, and all other
requests leave as they arrive. Clients may describe and list the group and the transactions.

Produce requests are not checked: a batch that names an owner's transactional id also needs the producer id and the
epoch of that owner's current session. The brokers' ACLs protect the ids from clients that bypass the proxy.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.api_keys import ApiKey, check_version
from protocol.apis.coordinated_ids import (
    GROUP_APIS,
    TRANSACTION_APIS,
    CoordinatedIds,
    deleted_groups,
    peek_ids,
    refusal,
    with_refused_groups,
    without_groups,
)
from protocol.errors import ErrorCode
from protocol.steps import Steps
from proxy.handlers.turns import Decision, decide_in_turns, patched_by
from proxy.wire.exchange import (
    Answer,
    BegunRequest,
    Buffers,
    CutThrough,
    Exchange,
    Forward,
    Handler,
    HeldRequest,
    PrefixHandler,
    Prepare,
    Request,
    Respond,
)


@dataclass(frozen=True, slots=True)
class OwnIds:
    """The group of the owners. Their transactional ids begin with the group's id and a hyphen."""

    group_id: str

    def refusal_of(self, ids: CoordinatedIds) -> ErrorCode | None:
        """Returns the error for a client that uses `ids`. None: they are not the owners'."""
        if ids.transactional_id is not None and ids.transactional_id.startswith(f"{self.group_id}-"):
            return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        return ErrorCode.GROUP_AUTHORIZATION_FAILED if ids.group_id == self.group_id else None


class OwnIdsGuard:
    """Implements `PrefixHandler` for the requests to coordinators, and `Handler` for those that it refuses."""

    def __init__(self, own: OwnIds) -> None:
        self._own = own

    def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, Respond | None] | HeldRequest:
        check_version(begun.api_key, begun.api_version)
        if self._own.refusal_of(peek_ids(prefix)) is None:
            return CutThrough(), None
        return HeldRequest(self)

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        frame = exchange.request.frame
        code = self._own.refusal_of(peek_ids(frame))
        assert code is not None
        return decide_in_turns(self._refused(frame, code))

    def _refused(self, frame: bytes, code: ErrorCode) -> Steps[Decision]:
        return Answer(((yield from refusal.steps(frame, code)),)), None


class OwnGroupGuard:
    """Implements `Handler` for DeleteGroups, which names many groups. The broker answers for the other ones."""

    def __init__(self, own: OwnIds) -> None:
        self._own = own

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        return decide_in_turns(self._guarded(request))

    def _guarded(self, request: Request) -> Steps[Decision]:
        if self._own.group_id not in (yield from deleted_groups.steps(request.frame)):
            return Forward(request.frame), None
        frame = yield from without_groups.steps(request.frame, frozenset((self._own.group_id,)))
        return Forward(frame, hold_bytes=None), refusing(request.api_version, self._own.group_id)


def refusing(version: int, group_id: str) -> Respond:
    """Returns what adds the refusal of the group to a response."""

    def refused(response: memoryview) -> Steps[Buffers]:
        code = ErrorCode.GROUP_AUTHORIZATION_FAILED
        return ((yield from with_refused_groups.steps(response, version, [group_id], code)),)

    return patched_by(refused)


def own_ids_guards(group_id: str) -> tuple[dict[int, Handler], dict[int, PrefixHandler]]:
    """Returns the guards by API key: those that hold requests, and those that decide by a prefix."""
    own = OwnIds(group_id)
    guard = OwnIdsGuard(own)
    return {ApiKey.DELETE_GROUPS: OwnGroupGuard(own)}, dict.fromkeys((*TRANSACTION_APIS, *GROUP_APIS), guard)
