"""The transactional id and the group id of a request to a coordinator, and the responses that refuse the request.

The ids are the first fields of these requests, so that the first bytes are enough to read them. DeleteGroups names
many groups, so it is read as a whole. AddPartitionsToTxn from version 4 on is a request of brokers, which names many
transactional ids; the proxy does not advertise these versions (`protocol/api_keys.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.api_keys import ApiKey, is_flexible
from protocol.errors import LimitExceededError, ProtocolError
from protocol.header import build_response_header, check_first_array, parse_request_header, response_body_position
from protocol.message_schema import FieldSchema
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT8,
    INT16,
    Buffer,
    read_array_length,
    read_string,
    write_array_length,
    write_bytes_length,
    write_string,
)
from protocol.schema import Span, compile_message
from protocol.splice import Splice, splice
from protocol.steps import Stepped, Steps

MAX_REFUSED_BYTES = 64 * 1024
_COMMITS_BY_TOPIC_ID_FROM = 10
_PRODUCER_BYTES = 10
"""The producer id and the producer epoch, which lie between two ids."""

TRANSACTION_APIS = (
    ApiKey.INIT_PRODUCER_ID,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN,
    ApiKey.END_TXN,
    ApiKey.TXN_OFFSET_COMMIT,
)
GROUP_APIS = (
    ApiKey.OFFSET_COMMIT,
    ApiKey.JOIN_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.LEAVE_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.OFFSET_DELETE,
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.SHARE_GROUP_HEARTBEAT,
    ApiKey.STREAMS_GROUP_HEARTBEAT,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS,
    ApiKey.DELETE_SHARE_GROUP_OFFSETS,
)


class CoordinatedIds(NamedTuple):
    """The ids that a request uses. None: it uses no such id."""

    transactional_id: str | None
    group_id: str | None


def peek_ids(prefix: Buffer) -> CoordinatedIds:
    """Reads the ids of a request of `TRANSACTION_APIS` or `GROUP_APIS` whose payload begins with `prefix`.

    Raises `TruncatedError` when `prefix` ends before the ids."""
    api_key, version, _, _, pos = parse_request_header(prefix)
    compact = is_flexible(api_key, version)
    if api_key in GROUP_APIS:
        return CoordinatedIds(None, read_string(prefix, pos, compact)[0])
    if api_key not in TRANSACTION_APIS:
        raise ProtocolError(f"API key {api_key} has no coordinated ids")
    transactional_id, pos = read_string(prefix, pos, compact)
    if api_key == ApiKey.ADD_OFFSETS_TO_TXN:
        return CoordinatedIds(transactional_id, read_string(prefix, pos + _PRODUCER_BYTES, compact)[0])
    if api_key == ApiKey.TXN_OFFSET_COMMIT:
        return CoordinatedIds(transactional_id, read_string(prefix, pos, compact)[0])
    return CoordinatedIds(transactional_id, None)


@Stepped
def refusal(frame: Buffer, code: int) -> Steps[bytes]:
    """Returns the response that refuses a request of `TRANSACTION_APIS` or `GROUP_APIS` with an error code.

    A response that answers each partition refuses every partition of the request. Raises `ProtocolError`, also for a
    request above `MAX_REFUSED_BYTES`: its connection closes instead."""
    if len(frame) > MAX_REFUSED_BYTES:
        raise LimitExceededError(f"a request of {len(frame)} bytes with an id of the remote log's own")
    header = parse_request_header(frame)
    api_key, version = header.api_key, header.api_version
    plan = compile_message(api_key, version, "Response")
    answers = yield from _answers_of_partitions(frame, api_key, version, code)
    body = _struct(plan.schema.fields, version, plan.is_flexible, {"ErrorCode": INT16.pack(code), **answers})
    return build_response_header(api_key, version, header.correlation_id) + body


def _answers_of_partitions(frame: Buffer, api_key: int, version: int, code: int) -> Steps[Mapping[str, bytes]]:
    if api_key == ApiKey.ADD_PARTITIONS_TO_TXN:
        topics, results, name = "V3AndBelowTopics", "ResultsByTopicV3AndBelow", "Name"
    elif api_key in (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT):
        topics, results = "Topics", "Topics"
        name = "TopicId" if api_key == ApiKey.OFFSET_COMMIT and version >= _COMMITS_BY_TOPIC_ID_FROM else "Name"
    else:
        return {}
    plan = compile_message(api_key, version, "Request")
    pos, compact = parse_request_header(frame).body_position, plan.is_flexible
    yield from plan.skip.steps(frame, pos)
    end = EMPTY_TAGGED_SECTION if compact else b""
    found = (yield from plan.selector((topics,), (name, "Partitions")).steps(frame, pos)).structs
    out = bytearray(write_array_length(len(found), compact))
    if api_key == ApiKey.ADD_PARTITIONS_TO_TXN:
        indexes = _int32_arrays(frame, [partitions for _, partitions in found], compact)
    else:
        select = plan.selector((topics, "Partitions"), ("PartitionIndex",))
        each = [span for (span,) in (yield from select.steps(frame, pos)).structs]
        indexes, taken = [], 0
        for _, partitions in found:
            count = read_array_length(frame, partitions.start, compact)[0]
            indexes.append([bytes(frame[span.start : span.end]) for span in each[taken : taken + count]])
            taken += count
            yield
    for (topic, _), numbers in zip(found, indexes, strict=True):
        out += frame[topic.start : topic.end]
        out += write_array_length(len(numbers), compact)
        for number in numbers:
            out += number + INT16.pack(code) + end
            yield
        out += end
    return {results: bytes(out)}


def _int32_arrays(frame: Buffer, spans: Sequence[Span], compact: bool) -> list[list[bytes]]:
    found = []
    for span in spans:
        count, at = read_array_length(frame, span.start, compact)
        found.append([bytes(frame[at + 4 * n : at + 4 * n + 4]) for n in range(count)])
    return found


_SIZES = {"bool": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4, "int64": 8, "float64": 8, "uuid": 16}


def _struct(fields: Sequence[FieldSchema], version: int, compact: bool, given: Mapping[str, bytes]) -> bytes:
    """Encodes a struct: the given fields, and no value in all others. Tagged fields are left out."""
    out = bytearray()
    for field in fields:
        if version in field.versions and version not in field.tagged_versions:
            out += given[field.name] if field.name in given else _no_value(field, version, compact)
    return bytes(out + EMPTY_TAGGED_SECTION if compact else out)


def _no_value(field: FieldSchema, version: int, compact: bool) -> bytes:
    """Encodes null, or else -1 for ids and epochs of producers and generations, or else 0 or an empty value."""
    is_nullable = version in field.nullable_versions
    if field.name in _MINUS_ONE:
        return b"\xff" * _SIZES[field.type]
    if field.type in _SIZES:
        return bytes(_SIZES[field.type])
    if field.type == "string":
        return write_string(None if is_nullable else "", compact)
    if field.is_array:
        return write_array_length(-1 if is_nullable else 0, compact)
    if field.type in ("bytes", "records"):
        return write_bytes_length(-1 if is_nullable else 0, compact)
    return INT8.pack(-1) if is_nullable else _struct(field.fields, version, compact, {})


_MINUS_ONE = frozenset(
    ("ProducerId", "ProducerEpoch", "OngoingTxnProducerId", "OngoingTxnProducerEpoch", "GenerationId")
)


@Stepped
def deleted_groups(frame: Buffer) -> Steps[list[str]]:
    """Returns the groups that a DeleteGroups request names, in wire order. Raises `ProtocolError`."""
    return [name for name, _ in (yield from _named_groups(frame))]


def _named_groups(frame: Buffer) -> Steps[list[tuple[str, Span]]]:
    header = parse_request_header(frame)
    check_first_array(frame)
    plan = compile_message(ApiKey.DELETE_GROUPS, header.api_version, "Request")
    yield from plan.skip.steps(frame, header.body_position)
    ((names_at,),) = (yield from plan.selector((), ("GroupsNames",)).steps(frame, header.body_position)).structs
    count, at = read_array_length(frame, names_at.start, plan.is_flexible)
    groups = []
    for _ in range(count):
        start = at
        name, at = read_string(frame, start, plan.is_flexible)
        groups.append((name or "", Span(start, at)))
        yield
    return groups


@Stepped
def without_groups(frame: Buffer, kept_away: frozenset[str]) -> Steps[bytes]:
    """Returns a DeleteGroups request that does not name the groups `kept_away`. Raises `ProtocolError`."""
    header = parse_request_header(frame)
    plan = compile_message(ApiKey.DELETE_GROUPS, header.api_version, "Request")
    ((names_at,),) = (yield from plan.selector((), ("GroupsNames",)).steps(frame, header.body_position)).structs
    kept = [span for name, span in (yield from _named_groups(frame)) if name not in kept_away]
    names = b"".join(bytes(frame[span.start : span.end]) for span in kept)
    return (
        yield from splice.steps(frame, [Splice(*names_at, write_array_length(len(kept), plan.is_flexible) + names)])
    )


@Stepped
def with_refused_groups(payload: Buffer, version: int, refused: Sequence[str], code: int) -> Steps[bytes]:
    """Returns a DeleteGroups response that also refuses the groups `refused`. Raises `ProtocolError`."""
    plan = compile_message(ApiKey.DELETE_GROUPS, version, "Response")
    pos = response_body_position(ApiKey.DELETE_GROUPS, version, payload)
    yield from plan.skip.steps(payload, pos)
    ((results_at,),) = (yield from plan.selector((), ("Results",)).steps(payload, pos)).structs
    count, first = read_array_length(payload, results_at.start, plan.is_flexible)
    end = EMPTY_TAGGED_SECTION if plan.is_flexible else b""
    added = b"".join(write_string(name, plan.is_flexible) + INT16.pack(code) + end for name in refused)
    length = write_array_length(max(count, 0) + len(refused), plan.is_flexible)
    return (yield from splice.steps(payload, [Splice(results_at.start, first, length + added)]))
