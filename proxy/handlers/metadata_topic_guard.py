"""Guards the remote log's own topics: clients may not delete them or add partitions to them through the proxy.

The topics are those of the remote log metadata and of the failed deletions. The broker answers for the other topics of
a request, as always. `topic_tier_configs` refuses to create these topics and to change their settings, and `metadata`
keeps brokers from creating them. `delete_records` refuses to delete their records. Operators may move their replicas.
The brokers must refuse Produce requests to them, by ACLs: a Produce request names topics between its record sets, so
the proxy would have to walk every request. The readers of the topics ignore what other programs wrote outside of a
transaction (`committed_records`). `own_ids_guard` keeps clients away from the owners' group and transactional ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from uuid import UUID

from protocol.api_keys import check_version
from protocol.apis.named_topics import NamedTopic, Refusal, Replaced, with_refusals, without_topics
from protocol.errors import ErrorCode
from protocol.steps import Steps
from proxy.handlers.turns import decide_in_turns, patched_by
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Request, Respond

REFUSAL = Refusal(
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    "This topic is one of the remote log's own: it cannot be changed through the proxy.",
)


class MetadataTopicGuard:
    """Implements `Handler` for DeleteTopics and CreatePartitions. `topic_name` returns a topic's latest known name,
    in any thread."""

    def __init__(self, own_topics: Collection[str], topic_name: Callable[[UUID], str | None]) -> None:
        self._own_topics = own_topics
        self._topic_name = topic_name

    def _refusal_of(self, topic: NamedTopic) -> Refusal | None:
        name = topic.name
        if name is None and topic.topic_id is not None:
            name = self._topic_name(topic.topic_id)
        return REFUSAL if name in self._own_topics else None

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        return decide_in_turns(self.guarded(request))

    def guarded(
        self, request: Request, refusal_of: Callable[[NamedTopic], Refusal | None] = lambda topic: None
    ) -> Steps[tuple[Forward, Respond | None]]:
        """Returns the request without our own topics, and without others that `refusal_of` refuses.

        Raises `ProtocolError`."""
        frame, replaced = yield from without_topics.steps(
            request.frame,
            request.api_key,
            request.api_version,
            lambda topic: self._refusal_of(topic) or refusal_of(topic),
        )
        if not replaced:
            return Forward(frame), None
        return Forward(frame, hold_bytes=None), refusing(request.api_key, request.api_version, replaced)


def refusing(api_key: int, version: int, replaced: Mapping[str, Replaced]) -> Respond:
    """Returns what adds the refusals of the replaced topics to a response."""

    def refused(response: memoryview) -> Steps[Buffers]:
        return ((yield from with_refusals.steps(response, api_key, version, replaced)),)

    return patched_by(refused)
