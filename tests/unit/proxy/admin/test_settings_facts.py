"""The effective settings: where each value comes from, and what is not shown."""

from __future__ import annotations

from proxy.admin.facts import SettingLine
from proxy.admin.settings_facts import REDACTED, settings_page
from proxy.config import TidegateConfig
from tests.support.proxy.parsed_config import parse_config
from tiers.config.tier_config import parse_config_text

FILE = """
workers = 2
remote.log.reader.threads = 7
[upstream]
bootstrap.servers = "kafka-1:9092,kafka-2:9093"
[upstream.sasl]
mechanism = "PLAIN"
username = "proxy"
password = "of-the-broker"
[storage]
implementation = "s3"
bucket = "tier"
endpoint.url = "https://user:of-the-url@s3.example.org/?sig=of-the-query"
access.key.id = "of-the-id"
secret.access.key = "of-the-store"
[[topics]]
pattern = "orders-*"
[[topics]]
pattern = "audit"
local.retention.ms = "6h"
"""


def by_key(config: TidegateConfig, *environ: str) -> dict[tuple[str, str], SettingLine]:
    return {(each.section, each.key): each for each in settings_page(config, environ).settings}


def test_a_value_names_its_source() -> None:
    lines = by_key(parse_config(FILE))
    assert (lines["", "workers"].value, lines["", "workers"].source) == ("2", "file")
    assert (lines["", "remote.log.reader.threads"].value, lines["", "remote.log.reader.threads"].source) == (
        "7",
        "file",
    )
    assert lines["limits", "max.connections"].source == "default"
    assert lines["limits", "max.connections"].value == "10000"
    assert lines["upstream", "bootstrap.servers"].value == "kafka-1:9092, kafka-2:9093"
    assert (lines["topics 2", "local.retention.ms"].value, lines["topics 2", "local.retention.ms"].source) == (
        "21600000",
        "file",
    )
    assert lines["topics 1", "local.retention.ms"].source == "default"


def test_a_variable_of_the_environment_is_named() -> None:
    environ = {
        "TIDEGATE__LIMITS__MAX_CONNECTIONS": "5",
        "TIDEGATE__TOPICS__1__SEGMENT_BYTES": "1MiB",
        "TIDEGATE__STORAGE__REGION": "eu",
    }
    config = parse_config_text(FILE, TidegateConfig, "file", environ)
    lines = by_key(config, *environ)
    for place, variable in zip(
        [("limits", "max.connections"), ("topics 2", "segment.bytes"), ("storage", "region")], environ, strict=True
    ):
        assert (lines[place].source, lines[place].variable) == ("environment", variable)
    assert lines["topics 1", "segment.bytes"].source == "default"
    assert lines["topics 1", "segment.bytes"].variable == "TIDEGATE__TOPICS__0__SEGMENT_BYTES"


def test_no_secret_is_shown() -> None:
    config = parse_config(FILE)
    shown = str(settings_page(config))
    for secret in ("of-the-broker", "of-the-store", "of-the-url", "of-the-query", "of-the-id"):
        assert secret not in shown
    lines = by_key(config)
    assert lines["upstream.sasl", "password"].value == REDACTED
    assert lines["storage", "secret.access.key"].value == REDACTED
    assert lines["storage", "bucket"].value == "tier"
    assert lines["storage", "endpoint.url"].value == "https://s3.example.org/"


def test_a_variable_of_the_first_listener_needs_no_number() -> None:
    environ = {"TIDEGATE__LISTENER__HOST": "0.0.0.0", "TIDEGATE__LISTENER__0__BASE_PORT": "9200"}
    lines = by_key(parse_config_text(FILE, TidegateConfig, "file", environ), *environ)
    for key, variable in zip(("host", "base.port"), environ, strict=True):
        line = lines["listener 1", key]
        assert (line.source, line.variable) == ("environment", variable)


OTHERS_MANAGERS = """
remote.log.metadata.manager.class.name = "their:Manager"
remote.log.metadata.pw = "of-their-metadata"
[upstream]
bootstrap.servers = "kafka-1:9092"
[storage]
implementation = "their:Store"
auth = "of-their-store"
login.file = "/their/file"
[[storage.locations]]
name = "b"
auth = "of-their-location"
[[storage.locations]]
name = "c"
implementation = "s3"
bucket = "ours"
endpoint.url = "https://user:of/the@url@s3.example.org"
"""


def test_no_value_of_another_manager_is_shown() -> None:
    """Tidegate does not know which of its keys hold a secret."""
    config = parse_config(OTHERS_MANAGERS)
    assert "of-their" not in str(settings_page(config))
    lines = by_key(config)
    assert lines["", "remote.log.metadata.pw"].value == REDACTED
    assert lines["", "remote.log.metadata.pw"].variable == "TIDEGATE__REMOTE_LOG_METADATA_PW"
    assert lines["storage", "auth"].value == lines["storage.locations 1", "auth"].value == REDACTED
    assert lines["storage", "login.file"].value == "/their/file"
    assert lines["storage.locations 2", "bucket"].value == "ours"
    assert lines["storage.locations 2", "endpoint.url"].value == "https://s3.example.org"
