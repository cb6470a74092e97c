"""Finds and replaces the topic names in DeleteTopics, CreatePartitions, DeleteRecords and Metadata.

The proxy uses this to protect a topic from a request. It replaces the topic's name by a name that no topic can have,
and turns the broker's answer for that name into the proxy's own refusal. All other bytes survive verbatim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.header import check_first_array, parse_request_header, response_body_position
from protocol.primitives import (
    INT16,
    Buffer,
    read_array_length,
    read_string,
    read_string_bounds,
    read_uuid,
    write_string,
)
from protocol.schema import MessagePlan, Span, compile_message
from protocol.splice import Splice, splice
from protocol.steps import Stepped, Steps

_IMPOSSIBLE = "tidegate/refused/"
"""The prefix of the replacement names. No topic's name may contain a slash."""
_NO_ID = bytes(16)
_IDS_FROM = 6
"""The first version of DeleteTopics with topic ids."""

_ANSWERS = {
    ApiKey.DELETE_TOPICS: "Responses",
    ApiKey.CREATE_PARTITIONS: "Results",
    ApiKey.DELETE_RECORDS: "Topics",
    ApiKey.METADATA: "Topics",
}
_MESSAGE_FROM = {ApiKey.DELETE_TOPICS: 5, ApiKey.CREATE_PARTITIONS: 0}


class NamedTopic(NamedTuple):
    """A topic in a request, named by its name or, since DeleteTopics v6, by its id.

    `name_at` and `id_at` are positions in the request; `id_at` is None in versions without ids."""

    name: str | None
    topic_id: UUID | None
    name_at: Span
    id_at: Span | None


class Refusal(NamedTuple):
    """The error that the client gets for a topic. Some APIs have no message."""

    code: int
    message: str


class Replaced(NamedTuple):
    """The original name and id of a topic that now has a replacement name, and its refusal."""

    name: str | None
    topic_id: UUID | None
    refusal: Refusal


@Stepped
def named_topics(frame: Buffer) -> Steps[list[NamedTopic]]:
    """Returns the topics that a request names, in wire order. Raises `ProtocolError`."""
    header = parse_request_header(frame)
    check_first_array(frame)
    plan = compile_message(header.api_key, header.api_version, "Request")
    pos, compact = header.body_position, plan.is_flexible
    yield from plan.skip.steps(frame, pos)
    has_ids = header.api_key == ApiKey.DELETE_TOPICS
    if has_ids and header.api_version < _IDS_FROM:
        return (yield from _plain_names(plan, frame, pos))
    names = ("Name", "TopicId") if has_ids else ("Name",)
    topics = []
    for name_at, *id_at in (yield from plan.selector(("Topics",), names).steps(frame, pos)).structs:
        topic_id = read_uuid(frame, id_at[0].start)[0] if id_at else None
        name = read_string(frame, name_at.start, compact)[0]
        topics.append(NamedTopic(name, topic_id, name_at, id_at[0] if id_at else None))
        yield
    return topics


def _plain_names(plan: MessagePlan, frame: Buffer, pos: int) -> Steps[list[NamedTopic]]:
    ((names_at,),) = (yield from plan.selector((), ("TopicNames",)).steps(frame, pos)).structs
    count, at = read_array_length(frame, names_at.start, plan.is_flexible)
    topics = []
    for _ in range(count):
        start, (_, end) = at, read_string_bounds(frame, at, plan.is_flexible)
        name, at = read_string(frame, at, plan.is_flexible)
        topics.append(NamedTopic(name, None, Span(start, end), None))
        yield
    return topics


@Stepped
def without_topics(
    frame: bytes, api_key: int, version: int, refusal_of: Callable[[NamedTopic], Refusal | None]
) -> Steps[tuple[bytes, dict[str, Replaced]]]:
    """Replaces the name of each topic for which `refusal_of` returns a refusal by a name that no topic can have.

    Returns the request, and the original topics by replacement name. Raises `ProtocolError`.
    """
    compact = compile_message(api_key, version, "Request").is_flexible
    replaced: dict[str, Replaced] = {}
    splices = []
    for topic in (yield from named_topics.steps(frame)):
        yield
        refusal = refusal_of(topic)
        if refusal is None:
            continue
        name = f"{_IMPOSSIBLE}{len(replaced)}"
        replaced[name] = Replaced(topic.name, topic.topic_id, refusal)
        splices.append(Splice(*topic.name_at, write_string(name, compact)))
        if topic.id_at is not None:
            splices.append(Splice(*topic.id_at, _NO_ID))
    return ((yield from splice.steps(frame, splices)) if splices else frame), replaced


@Stepped
def with_refusals(payload: memoryview, api_key: int, version: int, replaced: Mapping[str, Replaced]) -> Steps[bytes]:
    """Returns the response with the original names restored, and with the refusals of those topics.

    A response to DeleteRecords keeps the broker's error codes. Raises `ProtocolError`.
    """
    plan = compile_message(api_key, version, "Response")
    pos, compact = response_body_position(api_key, version, payload), plan.is_flexible
    yield from plan.skip.steps(payload, pos)
    names: tuple[str, ...] = ("ErrorCode", "Name") if api_key == ApiKey.METADATA else ("Name",)
    if api_key == ApiKey.DELETE_TOPICS and version >= _IDS_FROM:
        names += ("TopicId",)
    if api_key in _MESSAGE_FROM:
        names += ("ErrorCode",)
        if version >= _MESSAGE_FROM[ApiKey(api_key)]:
            names += ("ErrorMessage",)
    splices = []
    for found in (yield from plan.selector((_ANSWERS[ApiKey(api_key)],), names).steps(payload, pos)).structs:
        yield
        spans = dict(zip(names, found, strict=True))
        original = replaced.get(read_string(payload, spans["Name"].start, compact)[0] or "")
        if original is None:
            continue
        splices.append(Splice(*spans["Name"], write_string(original.name, compact)))
        if "TopicId" in spans and original.topic_id is not None:
            splices.append(Splice(*spans["TopicId"], original.topic_id.bytes))
        if "ErrorCode" in spans:
            splices.append(Splice(*spans["ErrorCode"], INT16.pack(original.refusal.code)))
        if "ErrorMessage" in spans:
            splices.append(Splice(*spans["ErrorMessage"], write_string(original.refusal.message, compact)))
    return (yield from splice.steps(payload, sorted(splices)))
