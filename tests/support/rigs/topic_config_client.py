"""Reads and changes a topic's settings with librdkafka's admin client, and with retries, which it lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import KafkaError

from tests.support.rigs.waiting import TIMEOUT_S, until


def described(bootstrap: str, topic: str, awaited: Mapping[str, str] | None = None) -> Mapping[str, ConfigEntry]:
    """Returns the settings when the broker knows the topic and has the `awaited` settings of its own.

    The broker learns of both shortly after the controller."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    awaited = awaited or {}
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            found: Mapping[str, ConfigEntry] = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART or time.monotonic() > deadline:
                raise
        else:
            if all(found[key].value == value for key, value in awaited.items()):
                return found
            assert time.monotonic() < deadline, {key: found[key].value for key in awaited}
        time.sleep(0.05)


def alter(
    bootstrap: str, settings: Mapping[str, Mapping[str, str | None]], *, validate_only: bool = False
) -> list[int]:
    """Changes settings of all topics incrementally, in one request. None unsets. Returns the error codes."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    operations = AlterConfigOpType
    resources = [
        ConfigResource(
            ConfigResource.Type.TOPIC,
            topic,
            incremental_configs=[
                ConfigEntry(key, value, incremental_operation=operations.DELETE if value is None else operations.SET)
                for key, value in changes.items()
            ],
        )
        for topic, changes in settings.items()
    ]

    def ask() -> list[int]:
        futures = admin.incremental_alter_configs(resources, validate_only=validate_only)
        return [code_of(futures[resource]) for resource in resources]

    return in_time(ask)


def replace(bootstrap: str, topic: str, config: Mapping[str, str]) -> int:
    """Replaces all settings with AlterConfigs, which unsets the missing ones. Returns the error code."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, set_config=dict(config))

    def ask() -> list[int]:
        with pytest.deprecated_call():
            return [code_of(admin.alter_configs([resource])[resource])]

    (code,) = in_time(ask)
    return code


def in_time(ask: Callable[[], list[int]]) -> list[int]:
    """Repeats a request that timed out for a topic. Kafka's own tools retry, but this client does not."""
    codes: list[int] = []

    def is_answered() -> bool:
        codes[:] = ask()
        return KafkaError.REQUEST_TIMED_OUT not in codes

    until(is_answered)
    return codes


def code_of(future: object) -> int:
    try:
        future.result(TIMEOUT_S)  # type: ignore[attr-defined]  # the library's futures are not typed
    except KafkaException as error:
        return int(error.args[0].code())
    return 0
