"""`tidegate check` on topics: what each rule decides, and which retention has no effect."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DescribeConfigsResponse

from protocol.api_keys import ApiKey
from proxy.commands.topic_check import conflicts, is_never_trimmed, rule_lines, topic_findings, useless_local_retentions
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.proxy.parsed_config import parse_config
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.topic_policy import TopicConfig, TopicPolicy, policy_of
from tiers.config.total_retention import NO_TOTAL, TotalRetention

DAY_MS = 86_400_000
BROKER = {"cleanup.policy": "delete", "retention.ms": str(7 * DAY_MS), "retention.bytes": "1000"}
NO_TOPIC = "warning: matches no topic: correct the rule, create the topic, or give the proxy DESCRIBE on it"


def said_of(*rules: TopicConfig, topics: tuple[str, ...]) -> list[str]:
    return [line.removeprefix("[[topics]] ") for line in rule_lines(rules, topics)]


def policy(recorded: TotalRetention = NO_TOTAL, **settings: Any) -> TopicPolicy:
    rule = TopicConfig(pattern="orders", **settings)
    made = policy_of("orders", UUID(int=7), 1, rule, BROKER, recorded.config())
    assert isinstance(made, TopicPolicy)
    return made


def test_the_first_rule_that_matches_decides() -> None:
    rules = [
        TopicConfig(pattern="orderz-*"),
        TopicConfig(pattern="orders-eu", remote_storage_enable=False),
        TopicConfig(pattern="orders-*"),
        TopicConfig(pattern="*-eu"),
        TopicConfig(pattern="__consumer*"),
        TopicConfig(pattern="*"),
    ]
    topics = ("orders-eu", "orders-us", "__consumer_offsets", *(f"t{number}" for number in range(8)))
    assert said_of(*rules, topics=topics) == [
        f"orderz-*: {NO_TOPIC}",
        "orders-eu: excludes orders-eu",
        "orders-*: matches orders-us",
        "*-eu: warning: earlier rules decide about all topics that it matches: move it up, or remove it",
        f"__consumer*: {NO_TOPIC}",
        "*: matches t0, t1, t2, t3, t4, and 3 more",
    ]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("local_retention_ms", 30 * DAY_MS, "local.retention.ms is 2592000000 ms, more than the total of 604800000 ms"),
        ("local_retention_bytes", 1001, "local.retention.bytes is 1001 bytes, more than the total of 1000 bytes"),
    ],
)
def test_a_local_retention_above_the_total_is_a_problem(key: str, value: int, said: str) -> None:
    [problem] = useless_local_retentions(policy(NO_TOTAL, **{key: value}))
    total = key.removeprefix("local_").replace("_", ".")
    assert (
        problem == f"orders: {said} ({total}), so it trims nothing: lower local.{total}, or raise {total} on the topic"
    )


def test_a_local_retention_up_to_the_total_is_none() -> None:
    assert list(useless_local_retentions(policy(local_retention_ms=7 * DAY_MS, local_retention_bytes=1000))) == []


def test_a_recorded_total_counts_and_not_that_of_the_broker() -> None:
    recorded = TotalRetention(minutes=30 * 1_440)
    assert list(useless_local_retentions(policy(recorded, local_retention_ms=8 * DAY_MS))) == []
    [problem] = useless_local_retentions(policy(recorded, local_retention_ms=31 * DAY_MS))
    assert "(remote.log.retention.minutes)" in problem


def test_a_topic_without_a_local_retention_is_never_trimmed() -> None:
    assert is_never_trimmed(policy())
    assert not is_never_trimmed(policy(local_retention_bytes=1))
    assert not is_never_trimmed(policy(TotalRetention(minutes=1)))
    assert not is_never_trimmed(policy(copy_disable=True))


def test_a_check_names_a_total_that_is_not_in_force() -> None:
    [problem] = conflicts([policy(TotalRetention(minutes=90), total_retention_minutes=60), policy()])
    assert problem.startswith("orders: nothing expires: the file has remote.log.retention.minutes=60, and")


@pytest.mark.parametrize("manager", ["", 'remote.log.metadata.manager.class.name = "own"'])
async def test_the_check_reads_the_retentions_of_the_brokers(manager: str) -> None:
    """Without the metadata topic it says the rules alone: the proxy alone may open a database with recorded totals."""

    async def described(request: Any) -> DescribeConfigsResponse:
        result = DescribeConfigsResponse.DescribeConfigsResult
        entry = partial(
            result.DescribeConfigsResourceResult,
            read_only=False, config_source=1, is_sensitive=False, synonyms=[], config_type=0,
        )  # fmt: skip
        entries = [entry(name=name, value=value) for name, value in BROKER.items()]
        resources = [
            result(
                error_code=0, error_message=None, resource_type=2, resource_name=asked.resource_name, configs=entries
            )
            for asked in request.resources
        ]
        return DescribeConfigsResponse(throttle_time_ms=0, results=resources)

    async with ScriptedBroker() as broker:
        broker.topics = [TopicMetadata("orders", UUID(int=1), {}), TopicMetadata("all", UUID(int=2), {})]
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = described
        config = parse_config(f"""
{manager}
[upstream]
bootstrap.servers = "127.0.0.1:{broker.port}"
[storage]
implementation = "local"
path = "x"
[[topics]]
name = "orders"
local.retention.ms = "30d"
[[topics]]
name = "all"
[[topics]]
name = "orderz"
""")
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        found = await topic_findings(config, client)
        await client.close()
    assert found.tiered == "by [[topics]] orders: orders; by [[topics]] all: all; by [[topics]] orderz: no topic"
    rules = ["orders: matches orders", "all: matches all", f"orderz: {NO_TOPIC}"]
    assert found.rules == [f"[[topics]] {each}" for each in rules]
    if manager:
        assert (found.problems, found.remarks) == ([], [])
    else:
        [problem], [remark] = found.problems, found.remarks
        assert problem.startswith("orders: local.retention.ms is 2592000000 ms, more than the total of 604800000 ms")
        assert remark.startswith("all is never trimmed")
