"""Options have the names and the checks of Spark's own Kafka source, and a few of ours."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pipeline.config import load_pipeline_config
from pipeline.source.kafka_identity import IDENTITY, WITHOUT_EFFECT
from pipeline.source.options import EARLIEST, LATEST, REFUSED, Access, OptionError, ReadOptions, Tier, parse_options
from tests.support.servers.kafka import java_command

BROKER = {"kafka.bootstrap.servers": "broker:9092"}
ORDERS = {**BROKER, "subscribe": "orders"}


def batch(**options: str) -> ReadOptions:
    return parse_options({**ORDERS, **options}, is_streaming=False)


def stream(**options: str) -> ReadOptions:
    return parse_options({**ORDERS, **options}, is_streaming=True)


@pytest.fixture
def tier_file(tmp_path: Path) -> str:
    file = tmp_path / "tidegate.toml"
    file.write_text(
        '[upstream]\nbootstrap.servers = "own:9092"\n[storage]\nimplementation = "local"\npath = "/nowhere"\n'
    )
    return str(file)


def test_defaults_and_names_are_those_of_sparks_kafka_source() -> None:
    options = batch()
    assert (options.starting.default, options.ending.default) == (EARLIEST, LATEST)
    assert stream().starting.default == LATEST
    assert options.fail_on_data_loss
    assert not options.include_headers
    assert not options.is_committed_only
    assert (options.access, options.tier) == (Access.PROXY, Tier.AUTO)
    assert options.kafka.bootstrap_servers == (("broker", 9092),)
    options = batch(startingoffsets='{"orders":{"0":5,"1":-2}}', FAILONDATALOSS="False", MinPartitions="7")
    assert options.starting.each == {("orders", 0): 5, ("orders", 1): EARLIEST}
    assert not options.fail_on_data_loss
    assert options.min_partitions == 7


def test_topics_are_named_matched_or_assigned() -> None:
    known = ["orders", "orders-eu", "payments"]
    assert batch(subscribe=" orders , payments ").subscription.topics_among(known) == ["orders", "payments"]
    pattern = parse_options({**BROKER, "subscribePattern": "orders.*"}, is_streaming=False).subscription
    assert pattern.topics_among(known) == ["orders", "orders-eu"]
    exact = parse_options({**BROKER, "subscribePattern": "orders"}, is_streaming=False).subscription
    assert exact.topics_among(known) == ["orders"]
    assigned = parse_options({**BROKER, "assign": '{"orders":[2,0]}'}, is_streaming=False).subscription
    assert assigned.assigned == (("orders", 2), ("orders", 0))


def test_the_more_specific_position_wins() -> None:
    times = '{"orders":{"0":1000}}'
    assert batch(startingTimestamp="5", startingOffsetsByTimestamp=times).starting.default == 5
    by_partition = batch(startingOffsetsByTimestamp=times, startingOffsets="earliest").starting
    assert (by_partition.each, by_partition.is_time) == ({("orders", 0): 1000}, True)
    assert by_partition.on_no_match == "error"
    assert batch(startingTimestamp="5", startingOffsetsByTimestampStrategy="latest").starting.on_no_match == "latest"
    assert batch(endingTimestamp="5").ending.on_no_match == "latest"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": " , "}, "No topics to subscribe"),
        ({"assign": "{}"}, "Only one of these may be specified"),
        ({"startingOffsets": "latest"}, "starting offset can't be latest for batch"),
        ({"startingOffsets": '{"orders":{"0":-1}}'}, "startingOffsets for orders-0 can't be latest"),
        ({"endingOffsets": "earliest"}, "ending offset can't be earliest for batch"),
        ({"endingOffsets": '{"orders":{"0":-2}}'}, "ending offset for orders-0 can't be earliest"),
        ({"startingOffsets": "5"}, "startingOffsets: expected a JSON object"),
        ({"startingOffsets": '{"orders":{"0":-3}}'}, "orders-0: -3"),
        ({"startingTimestamp": "now"}, "a number of milliseconds"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "is error or latest"),
        ({"minPartitions": "0"}, "minPartitions must be positive"),
        ({"minOffsetsPerTrigger": "2", "maxOffsetsPerTrigger": "1"}, "is higher than maxOffsetsPerTrigger"),
        ({"kafka.auto.offset.reset": "latest"}, "'auto.offset.reset' is not supported"),
        ({"kafka.isolation.level": "serializable"}, "read_committed or read_uncommitted"),
        ({"failOnDataLos": "false"}, r"unknown option failOnDataLos; did you mean failOnDataLoss\?"),
        ({"kafka.isolation.levl": "read_committed"}, r"kafka\.isolation\.levl; did you mean kafka\.isolation\.level\?"),
        ({"kafka.transactional.id": "x"}, r"unknown option kafka\.transactional\.id"),
        ({"failOnDataLoss": "perhaps"}, "is true or false"),
        ({"access": "direct"}, "access=direct needs the option config"),
        ({"tier": "remote"}, "tier=remote needs access=direct"),
        ({"tier": "cold"}, "tier is auto or remote or local"),
        ({"columns": "value", "kafka.security.protocol": "QUIC"}, "kafka.security.protocol is one of"),
        ({"kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "PLAIN"}, "jaas.config is missing"),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.truststore.location": "/ca.jks"},
            r"truststore\.type must be PEM",
        ),
        (
            {
                "kafka.security.protocol": "SASL_SSL",
                "kafka.sasl.mechanism": "GSSAPI",
                "kafka.sasl.jaas.config": 'PlainLoginModule required username="a" password="b";',
            },
            "kafka.sasl.mechanism",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        batch(**options)


def test_a_name_of_kafkas_consumer_without_effect_is_a_warning(
    tier_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    ignored = {"kafka.fetch.max.bytes": "1", "kafka.ssl.keystore.password": "hidden", "groupIdPrefix": "mine"}
    options = parse_options({"subscribe": "orders", "config": tier_file, **ignored}, is_streaming=False)
    said = [f"the option {name} has no effect" for name in ignored]
    assert sorted(record.getMessage() for record in caplog.records) == sorted(said)
    assert options.kafka == load_pipeline_config(Path(tier_file)).upstream  # none of them gives an identity


@pytest.mark.integration
def test_every_name_of_kafkas_consumer_is_known() -> None:
    command = java_command("org.apache.kafka.clients.consumer.ConsumerConfig", heap_mib=64)
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    names = set(re.findall(r'id="consumerconfigs_([a-z.]+)"', page))
    assert "isolation.level" in names
    assert names <= {"isolation.level", *IDENTITY, *WITHOUT_EFFECT, *(name.removeprefix("kafka.") for name in REFUSED)}


def test_a_batch_needs_topics_and_an_address_and_a_stream_has_no_end() -> None:
    with pytest.raises(OptionError, match="One of the following options must be specified"):
        parse_options(BROKER, is_streaming=False)
    with pytest.raises(OptionError, match=r"'kafka\.bootstrap\.servers' must be specified"):
        parse_options({"subscribe": "orders"}, is_streaming=False)
    with pytest.raises(OptionError, match="ending offset not valid in streaming queries"):
        stream(endingOffsets="latest")
    with pytest.raises(OptionError, match="ending timestamp not valid in streaming queries"):
        stream(endingTimestamp="5")
    assert stream(maxTriggerDelay="2m").max_trigger_delay_ms == 120_000


def test_a_file_with_a_store_is_read_directly_as_who_it_says(tier_file: str) -> None:
    options = parse_options({"subscribe": "orders", "config": tier_file}, is_streaming=False)
    assert options.access is Access.DIRECT
    assert options.kafka.bootstrap_servers == (("own", 9092),)
    through_proxy = batch(config=tier_file, access="proxy")
    assert through_proxy.config is None
    with pytest.raises(OptionError, match="must be specified"):
        parse_options({"subscribe": "orders", "config": tier_file, "access": "proxy"}, is_streaming=False)
    assert batch(tier="local").access is Access.DIRECT


def test_the_readers_own_identity_is_that_of_kafkas_clients(tier_file: str) -> None:
    jaas = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="a\\"b";'
    options = parse_options(
        {
            "subscribe": "orders",
            "config": tier_file,
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": jaas,
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": "/etc/ca.pem",
            "kafka.ssl.endpoint.identification.algorithm": "",
        },
        is_streaming=False,
    )
    kafka = options.kafka
    assert kafka.bootstrap_servers == (("own", 9092),)
    assert kafka.sasl is not None
    assert kafka.sasl.credentials().username == "alice"
    assert kafka.sasl.credentials().password == 'a"b'
    assert kafka.tls is not None
    assert kafka.tls.ca == Path("/etc/ca.pem")
    assert not kafka.tls.verify_host_name
    assert 'a"b' not in repr(options)
