"""Reads and replaces the config entries in the four APIs that carry the configuration of topics.

They are CreateTopics, DescribeConfigs, AlterConfigs and IncrementalAlterConfigs, in every version that the proxy
decodes. An entry that the proxy keeps has the same bytes as before, unknown tags included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from protocol.api_keys import ApiKey
from protocol.header import check_first_array, parse_request_header, response_body_position
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT8,
    INT16,
    MAX_ITEMS,
    Buffer,
    check_items,
    read_array_length,
    read_int8,
    read_int16,
    read_string,
    read_uuid,
    skip_tagged_section,
    skip_tags,
    write_array_length,
    write_string,
)
from protocol.schema import MessagePlan, Span, compile_message
from protocol.splice import Splice
from protocol.steps import Stepped, Steps

TOPIC_RESOURCE = 2
SET, DELETE, APPEND, SUBTRACT = range(4)

_RESPONSES_PATH = {
    ApiKey.CREATE_TOPICS: "Topics",
    ApiKey.ALTER_CONFIGS: "Responses",
    ApiKey.INCREMENTAL_ALTER_CONFIGS: "Responses",
    ApiKey.DESCRIBE_CONFIGS: "Results",
}


class ConfigChange(NamedTuple):
    """One entry of a request. `operation` is SET for the APIs that have no operations."""

    name: str
    operation: int
    value: str | None
    raw: bytes


class ConfigResource(NamedTuple):
    """One resource of a request. The resources of CreateTopics are always topics."""

    resource_type: int
    name: str
    changes: list[ConfigChange]
    configs_at: Span


class ConfigRequest(NamedTuple):
    api_key: int
    version: int
    is_flexible: bool
    resources: list[ConfigResource]
    validate_only: bool
    validate_only_at: int


@Stepped
def parse_config_request(frame: Buffer) -> Steps[ConfigRequest]:
    """Parses a request of CreateTopics, AlterConfigs or IncrementalAlterConfigs. Raises `ProtocolError`."""
    header = parse_request_header(frame)
    check_first_array(frame)
    api_key, version, pos = header.api_key, header.api_version, header.body_position
    plan = compile_message(api_key, version, "Request")
    creates = api_key == ApiKey.CREATE_TOPICS
    path, names = (
        ("Topics", ("Name", "Configs")) if creates else ("Resources", ("ResourceType", "ResourceName", "Configs"))
    )
    yield from plan.selector((path, "Configs"), ("Name",)).steps(frame, pos, MAX_ITEMS)
    yield from plan.skip.steps(frame, pos)
    resources: list[ConfigResource] = []
    for spans in (yield from plan.selector((path,), names).steps(frame, pos)).structs:
        kind = TOPIC_RESOURCE if creates else read_int8(frame, spans[0].start)[0]
        name, _ = read_string(frame, spans[-2].start, plan.is_flexible)
        changes = yield from _read_changes(frame, spans[-1].start, api_key, plan.is_flexible)
        resources.append(ConfigResource(kind, name or "", changes, spans[-1]))
        yield
    flag = "validateOnly" if creates else "ValidateOnly"
    ((flag_at,),) = (yield from plan.selector((), (flag,)).steps(frame, pos)).structs
    validate_only = frame[flag_at.start] != 0
    return ConfigRequest(api_key, version, plan.is_flexible, resources, validate_only, flag_at.start)


def _read_changes(buf: Buffer, pos: int, api_key: int, compact: bool) -> Steps[list[ConfigChange]]:
    count, pos = read_array_length(buf, pos, compact)
    changes = []
    for _ in range(count):
        start = pos
        name, pos = read_string(buf, pos, compact)
        operation = SET
        if api_key == ApiKey.INCREMENTAL_ALTER_CONFIGS:
            operation, pos = read_int8(buf, pos)
        value, pos = read_string(buf, pos, compact)
        if compact:
            pos = yield from skip_tags(buf, pos)
        changes.append(ConfigChange(name or "", operation, value, bytes(buf[start:pos])))
        yield
    return changes


def replace_changes(request: ConfigRequest, resource: ConfigResource, kept: Iterable[ConfigChange]) -> Splice:
    """Returns the splice that leaves the resource with only the changes in `kept`."""
    entries = [change.raw for change in kept]
    return Splice(*resource.configs_at, write_array_length(len(entries), request.is_flexible) + b"".join(entries))


def only_validate(request: ConfigRequest) -> Splice:
    """Returns the splice after which the broker checks the request and changes nothing."""
    return Splice(request.validate_only_at, request.validate_only_at + 1, b"\x01")


def setting(request: ConfigRequest, name: str, value: str) -> ConfigChange:
    """Returns a change, encoded for this request, that sets `name` to `value`."""
    compact = request.is_flexible
    raw = write_string(name, compact)
    if request.api_key == ApiKey.INCREMENTAL_ALTER_CONFIGS:
        raw += INT8.pack(SET)
    raw += write_string(value, compact) + (EMPTY_TAGGED_SECTION if compact else b"")
    return ConfigChange(name, SET, value, raw)


class ConfigAnswer(NamedTuple):
    """The broker's answer for one resource.

    `configs_at` is the position of its config entries; None when the API or version has none."""

    resource_type: int
    name: str
    topic_id_bytes: bytes | None
    error_code: int
    error_message: str | None
    error_at: Span
    """The error code and the error message, which follow each other."""
    configs_at: Span | None


class ConfigResponse(NamedTuple):
    api_key: int
    version: int
    is_flexible: bool
    answers: list[ConfigAnswer]


@Stepped
def parse_config_response(api_key: int, version: int, payload: Buffer) -> Steps[ConfigResponse]:
    """Parses a response of any of the four APIs. Raises `ProtocolError`."""
    pos = response_body_position(api_key, version, payload)
    plan = compile_message(api_key, version, "Response")
    yield from plan.skip.steps(payload, pos)
    names = _answer_fields(api_key, version)
    answers = []
    for found in (yield from plan.selector((_RESPONSES_PATH[ApiKey(api_key)],), names).steps(payload, pos)).structs:
        spans = dict(zip(names, found, strict=True))
        code_at, message_at = spans["ErrorCode"], spans["ErrorMessage"]
        name_at = spans["Name" if api_key == ApiKey.CREATE_TOPICS else "ResourceName"]
        kind = read_int8(payload, spans["ResourceType"].start)[0] if "ResourceType" in spans else TOPIC_RESOURCE
        topic_id = read_uuid(payload, spans["TopicId"].start)[0].bytes if "TopicId" in spans else None
        answers.append(
            ConfigAnswer(
                kind,
                read_string(payload, name_at.start, plan.is_flexible)[0] or "",
                topic_id,
                read_int16(payload, code_at.start)[0],
                read_string(payload, message_at.start, plan.is_flexible)[0],
                Span(code_at.start, message_at.end),
                spans.get("Configs"),
            )
        )
        yield
    return ConfigResponse(api_key, version, plan.is_flexible, answers)


def _answer_fields(api_key: int, version: int) -> tuple[str, ...]:
    if api_key == ApiKey.CREATE_TOPICS:
        topic_id = ("TopicId",) if version >= 7 else ()
        configs = ("Configs",) if version >= 5 else ()
        return ("Name", *topic_id, "ErrorCode", "ErrorMessage", *configs)
    configs = ("Configs",) if api_key == ApiKey.DESCRIBE_CONFIGS else ()
    return ("ErrorCode", "ErrorMessage", "ResourceType", "ResourceName", *configs)


def replace_error(response: ConfigResponse, answer: ConfigAnswer, code: int, message: str | None) -> Splice:
    return Splice(*answer.error_at, INT16.pack(code) + write_string(message, response.is_flexible))


class Synonym(NamedTuple):
    name: str
    source: int
    raw: bytes


class ConfigEntry(NamedTuple):
    """One entry of a DescribeConfigs or CreateTopics answer."""

    name: str
    raw: bytes
    source: int
    value_at: Span
    """A position in `raw`, like the positions below."""
    source_at: int
    synonyms_at: Span | None
    synonyms: list[Synonym]


@Stepped
def read_entries(response: ConfigResponse, payload: Buffer, answer: ConfigAnswer) -> Steps[list[ConfigEntry]]:
    if answer.configs_at is None:
        return []
    compact, described = response.is_flexible, response.api_key == ApiKey.DESCRIBE_CONFIGS
    count, pos = read_array_length(payload, answer.configs_at.start, compact)
    entries = []
    for _ in range(count):
        start = pos
        name, value_pos = read_string(payload, pos, compact)
        _, pos = read_string(payload, value_pos, compact)
        value_at = Span(value_pos - start, pos - start)
        source, _ = read_int8(payload, pos + 1)
        source_at = pos + 1 - start
        pos += 3
        synonyms_at, synonyms = None, list[Synonym]()
        if described:
            first = pos
            synonyms, pos = _read_synonyms(payload, pos, compact)
            synonyms_at = Span(first - start, pos - start)
            if response.version >= 3:
                _, pos = read_string(payload, pos + 1, compact)
        if compact:
            pos = yield from skip_tags(payload, pos)
        raw = bytes(payload[start:pos])
        entries.append(ConfigEntry(name or "", raw, source, value_at, source_at, synonyms_at, synonyms))
        yield
    return entries


def _read_synonyms(buf: Buffer, pos: int, compact: bool) -> tuple[list[Synonym], int]:
    count, pos = read_array_length(buf, pos, compact)
    synonyms = []
    for _ in range(count):
        start = pos
        name, pos = read_string(buf, pos, compact)
        _, pos = read_string(buf, pos, compact)
        source, pos = read_int8(buf, pos)
        if compact:
            pos = skip_tagged_section(buf, pos)
        synonyms.append(Synonym(name or "", source, bytes(buf[start:pos])))
    return synonyms, pos


def write_synonym(response: ConfigResponse, name: str, value: str, source: int) -> Synonym:
    compact = response.is_flexible
    raw = write_string(name, compact) + write_string(value, compact) + INT8.pack(source)
    return Synonym(name, source, raw + EMPTY_TAGGED_SECTION if compact else raw)


def with_value(response: ConfigResponse, entry: ConfigEntry, value: str, source: int, synonyms: list[Synonym]) -> bytes:
    """Returns the entry's bytes with another value and source, and with other synonyms if the entry has synonyms."""
    compact, raw = response.is_flexible, entry.raw
    out = raw[: entry.value_at.start] + write_string(value, compact)
    out += raw[entry.value_at.end : entry.source_at] + INT8.pack(source)
    if entry.synonyms_at is None:
        return out + raw[entry.source_at + 1 :]
    out += raw[entry.source_at + 1 : entry.synonyms_at.start]
    out += write_array_length(len(synonyms), compact) + b"".join(synonym.raw for synonym in synonyms)
    return out + raw[entry.synonyms_at.end :]


def new_entry(response: ConfigResponse, name: str, value: str, source: int, config_type: int) -> bytes:
    """Returns the bytes of an entry that the broker did not send."""
    compact = response.is_flexible
    out = write_string(name, compact) + write_string(value, compact) + b"\x00" + INT8.pack(source) + b"\x00"
    if response.api_key == ApiKey.DESCRIBE_CONFIGS:
        out += write_array_length(0, compact)
        if response.version >= 3:
            out += INT8.pack(config_type) + write_string(None, compact)
    return out + EMPTY_TAGGED_SECTION if compact else out


def replace_entries(response: ConfigResponse, answer: ConfigAnswer, entries: list[bytes]) -> Splice:
    assert answer.configs_at is not None
    return Splice(*answer.configs_at, write_array_length(len(entries), response.is_flexible) + b"".join(entries))


class DescribedResource(NamedTuple):
    resource_type: int
    name: str
    keys: list[str] | None
    """The requested keys; None or an empty list asks for all keys."""


@Stepped
def parse_describe_configs_request(frame: Buffer) -> Steps[tuple[list[DescribedResource], bool]]:
    """Returns the requested resources and whether the client wants synonyms. Raises `ProtocolError`."""
    header = parse_request_header(frame)
    check_first_array(frame)
    pos = header.body_position
    plan: MessagePlan = compile_message(header.api_key, header.api_version, "Request")
    yield from plan.skip.steps(frame, pos)
    compact = plan.is_flexible
    names = ("ResourceType", "ResourceName", "ConfigurationKeys")
    resources: list[DescribedResource] = []
    items = 0
    for kind_at, name_at, keys_at in (yield from plan.selector(("Resources",), names).steps(frame, pos)).structs:
        count, at = read_array_length(frame, keys_at.start, compact)
        items += 1 + count
        check_items(items)
        keys = []
        for _ in range(count):
            key, at = read_string(frame, at, compact)
            keys.append(key or "")
            yield
        name = read_string(frame, name_at.start, compact)[0] or ""
        resources.append(DescribedResource(read_int8(frame, kind_at.start)[0], name, None if count < 0 else keys))
        yield
    ((flag_at,),) = (yield from plan.selector((), ("IncludeSynonyms",)).steps(frame, pos)).structs
    return resources, frame[flag_at.start] != 0
