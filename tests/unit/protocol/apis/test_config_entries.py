"""Requests and answers that carry configuration are read as Kafka's schemas say, and changed without losing a byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.apis.config_entries import (
    ConfigEntry,
    ConfigRequest,
    ConfigResponse,
    parse_config_request,
    parse_config_response,
    parse_describe_configs_request,
    read_entries,
    replace_changes,
    replace_entries,
    replace_error,
    setting,
    with_value,
    write_synonym,
)
from protocol.header import build_request_header, build_response_header
from protocol.message_schema import message_name
from protocol.schema import compile_message
from protocol.splice import splice
from tests.support.fakes.message_encoder import Message, encoded_messages

ALTERING = (ApiKey.CREATE_TOPICS, ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS)
SHOWING = (*ALTERING, ApiKey.DESCRIBE_CONFIGS)


def versions(api_keys: tuple[ApiKey, ...]) -> list[tuple[ApiKey, int]]:
    return [(key, version) for key in api_keys for version in range(DECODED_APIS[key][0], DECODED_APIS[key][1] + 1)]


def drawn_request(data: st.DataObject, api_key: ApiKey, version: int) -> tuple[bytes, Message]:
    message = data.draw(encoded_messages(message_name(api_key, "Request"), version))
    return build_request_header(api_key, version, 7, "test") + message.payload, message


def drawn_response(data: st.DataObject, api_key: ApiKey, version: int) -> tuple[memoryview, Message, ConfigResponse]:
    message = data.draw(encoded_messages(message_name(api_key, "Response"), version))
    payload = memoryview(build_response_header(api_key, version, 7) + message.payload)
    return payload, message, parse_config_response(api_key, version, payload)


@pytest.mark.parametrize(("api_key", "version"), versions(ALTERING))
@settings(max_examples=25)
@given(data=st.data())
def test_a_request_is_read_by_its_schema_and_put_together_again(
    api_key: ApiKey, version: int, data: st.DataObject
) -> None:
    frame, message = drawn_request(data, api_key, version)
    request = parse_config_request(frame)
    creates = api_key == ApiKey.CREATE_TOPICS
    trees = message.tree["Topics" if creates else "Resources"]
    assert [one.name for one in request.resources] == [tree["Name" if creates else "ResourceName"] for tree in trees]
    assert [[(change.name, change.value) for change in one.changes] for one in request.resources] == [
        [(entry["Name"], entry["Value"]) for entry in tree["Configs"]] for tree in trees
    ]
    assert request.validate_only == message.tree["validateOnly" if creates else "ValidateOnly"]
    same = [replace_changes(request, one, one.changes) for one in request.resources]
    assert splice(frame, same) == frame
    _is_readable_without_its_first_changes(request, frame)


def _is_readable_without_its_first_changes(request: ConfigRequest, frame: bytes) -> None:
    ours = setting(request, "key", "value")
    shorter = splice(frame, [replace_changes(request, one, [*one.changes[1:], ours]) for one in request.resources])
    again = parse_config_request(shorter)
    for before, after in zip(request.resources, again.resources, strict=True):
        assert [change.raw for change in after.changes] == [*(change.raw for change in before.changes[1:]), ours.raw]


@pytest.mark.parametrize(("api_key", "version"), versions(SHOWING))
@settings(max_examples=25)
@given(data=st.data())
def test_an_answer_gets_another_error_and_nothing_else(api_key: ApiKey, version: int, data: st.DataObject) -> None:
    payload, _, response = drawn_response(data, api_key, version)
    patched = splice(payload, [replace_error(response, one, 40, "why") for one in response.answers])
    again = parse_config_response(api_key, version, patched)
    assert [(one.name, one.resource_type, one.topic_id_bytes) for one in again.answers] == [
        (one.name, one.resource_type, one.topic_id_bytes) for one in response.answers
    ]
    assert {one.error_code for one in again.answers} <= {40}
    for before, after in zip(response.answers, again.answers, strict=True):
        assert entries(again, patched, after) == entries(response, payload, before)


def entries(response: ConfigResponse, payload: memoryview | bytes, answer: object) -> list[ConfigEntry]:
    found = [one for one in response.answers if one is answer]
    return read_entries(response, memoryview(payload), found[0])


@pytest.mark.parametrize(("api_key", "version"), versions((ApiKey.CREATE_TOPICS, ApiKey.DESCRIBE_CONFIGS)))
@settings(max_examples=25)
@given(data=st.data())
def test_an_entry_gets_another_value_and_source(api_key: ApiKey, version: int, data: st.DataObject) -> None:
    payload, _, response = drawn_response(data, api_key, version)
    for answer in response.answers:
        known = read_entries(response, payload, answer)
        if not known:
            continue
        assert splice(payload, [replace_entries(response, answer, [entry.raw for entry in known])]) == payload
        ours = write_synonym(response, "key", "5", 1)
        changed = [with_value(response, entry, "5", 1, [ours]) for entry in known]
        patched = splice(payload, [replace_entries(response, answer, changed)])
        plan = compile_message(api_key, version, "Response")
        body = len(build_response_header(api_key, version, 7))
        assert plan.skip(patched, body) == len(patched)
        place = response.answers.index(answer)
        again = parse_config_response(api_key, version, patched)
        shown = read_entries(again, memoryview(patched), again.answers[place])
        assert [(entry.name, entry.source) for entry in shown] == [(entry.name, 1) for entry in known]


@pytest.mark.parametrize("version", range(1, 5))
@settings(max_examples=25)
@given(data=st.data())
def test_the_described_configs_are_read_by_the_schema(version: int, data: st.DataObject) -> None:
    frame, message = drawn_request(data, ApiKey.DESCRIBE_CONFIGS, version)
    resources, with_synonyms = parse_describe_configs_request(frame)
    assert with_synonyms == message.tree["IncludeSynonyms"]
    assert [(one.resource_type, one.name, one.keys) for one in resources] == [
        (tree["ResourceType"], tree["ResourceName"], tree["ConfigurationKeys"]) for tree in message.tree["Resources"]
    ]
