"""The missing rights of the proxy on a topic that the first answer did not name."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kafka.protocol.admin import CreateTopicsRequest
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from proxy.cluster.permissions import missing_permissions
from tests.support.proxy.parsed_config import parse_config
from tiers.broker.client import BrokerClient

METADATA_TOPIC = "metadata"
ALL, READ_ONLY = {3, 4, 6, 8, 10}, {3, 8}


class Brokers:
    """Their metadata topic is there already, though no broker had heard of it when all topics were asked for."""

    def __init__(self, *answers: tuple[int, set[int] | None]) -> None:
        self._answers: Iterator[tuple[int, set[int] | None]] = iter(answers)

    async def request(self, node_id: int | None, message: Any, timeout_ms: int, **versions: int) -> Any:
        if isinstance(message, MetadataRequest):
            if message.topics is None:
                return SimpleNamespace(topics=[])
            code, rights = next(self._answers)
            return SimpleNamespace(topics=[SimpleNamespace(error_code=code, authorized_operations=rights)])
        if isinstance(message, CreateTopicsRequest):
            is_there = message.topics[0].name == METADATA_TOPIC
            code = ErrorCode.TOPIC_ALREADY_EXISTS if is_there else ErrorCode.NONE
            return SimpleNamespace(topics=[SimpleNamespace(error_code=code)])
        return SimpleNamespace(error_code=ErrorCode.NONE)


UNHEARD_OF = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)


@pytest.mark.parametrize(
    ("answers", "lacked"),
    [
        ([(ErrorCode.NONE, ALL)], []),
        ([UNHEARD_OF, UNHEARD_OF, (ErrorCode.NONE, ALL)], []),
        ([UNHEARD_OF, (ErrorCode.NONE, READ_ONLY)], ["WRITE on topic metadata", "DESCRIBE_CONFIGS on topic metadata"]),
        ([(ErrorCode.TOPIC_AUTHORIZATION_FAILED, None)], ["DESCRIBE on topic metadata"]),
        ([UNHEARD_OF, (ErrorCode.TOPIC_AUTHORIZATION_FAILED, None)], ["DESCRIBE on topic metadata"]),
    ],
)
async def test_a_topic_that_another_proxy_made_a_moment_ago_is_no_missing_right(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, set[int] | None]], lacked: list[str]
) -> None:
    monkeypatch.setattr("proxy.cluster.permissions._HEARD_WITHIN_MS", 60_000)
    config = parse_config(
        f'remote.log.metadata.topic.name = "{METADATA_TOPIC}"\n[upstream]\nbootstrap.servers = "127.0.0.1:1"\n'
    )
    client = cast(BrokerClient, Brokers(*answers))
    assert await missing_permissions(client, config, 1000) == (lacked, [])
