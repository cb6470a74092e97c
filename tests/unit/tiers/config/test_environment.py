"""Settings from environment variables: each overrides the file, and each mistake names the variable."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.config import PipelineConfig
from proxy.config import TidegateConfig
from tiers.config.tier_config import ConfigError, TierConfig, parse_config_text

FILE = """
remote.log.reader.threads = 10
[upstream]
bootstrap.servers = ["file:1"]
[storage]
implementation = "local"
path = "from-the-file"
[[topics]]
name = "orders"
local.retention.ms = "6h"
[listener]
bootstrap.port = 9092
"""


def parsed(environ: Mapping[str, str], text: str = FILE) -> TidegateConfig:
    return parse_config_text(text, TidegateConfig, "f.toml", {f"TIDEGATE__{name}": at for name, at in environ.items()})


def mistakes(environ: Mapping[str, str], text: str = FILE) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parsed(environ, text)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("model", [TidegateConfig, PipelineConfig])
def test_no_two_settings_share_a_variable(model: type[TierConfig]) -> None:
    settings = model.settings_by_variable().variables()
    places = [(one.section, one.key) for one in settings.values()]
    keys = {(section, key) for section in model.section_models() for key in model.keys_of(section)}
    named_by_managers_and_users = {("storage", "settings"), ("storage.locations", "settings"), ("encryption", "keys")}
    assert keys - named_by_managers_and_users - {("", "remote.log.storage.manager.class.name")} <= {*places}
    assert len({*places}) == len(places)


def test_variables_override_the_file() -> None:
    config = parsed(
        {
            "REMOTE_LOG_READER_THREADS": "20",
            "UPSTREAM__BOOTSTRAP_SERVERS": "a:1,b:2",
            "LISTENER__BOOTSTRAP_PORT": "9999",
            "LISTENER__PROXY_PROTOCOL_TRUSTED_NETWORKS": '["10.0.0.0/8"]',
            "STORAGE__PATH": "from-the-environment",
            "WORKERS": "2",
        }
    )
    assert config.remote_log.reader_threads == 20
    assert config.upstream.bootstrap_servers == (("a", 1), ("b", 2))
    (listener,) = config.listener
    assert (listener.bootstrap_port, config.workers) == (9999, 2)
    assert [str(one) for one in listener.proxy_protocol_trusted_networks] == ["10.0.0.0/8"]
    assert config.storage is not None
    assert config.storage.plain_settings() == {"path": "from-the-environment"}


def test_a_number_names_an_entry_of_a_list_or_adds_one() -> None:
    topics = parsed({"TOPICS__0__LOCAL_RETENTION_MS": "1h", "TOPICS__1__PATTERN": "logs-*"}).topics
    assert [(one.pattern, one.local_retention_ms) for one in topics] == [("orders", 3_600_000), ("logs-*", -2)]
    assert (
        parsed({"TOPICS__10__NAME": "l", **{f"TOPICS__{n}__NAME": f"t{n}" for n in range(10)}}).topics[10].pattern
        == "l"
    )


def test_variables_alone_are_enough() -> None:
    config = parsed(
        {
            "UPSTREAM__BOOTSTRAP_SERVERS": "a:1",
            "UPSTREAM__SASL__MECHANISM": "PLAIN",
            "UPSTREAM__SASL__USERNAME": "17",
            "UPSTREAM__SASL__PASSWORD": "0123",
            "STORAGE__IMPLEMENTATION": "s3",
            "STORAGE__SECRET_ACCESS_KEY": "x",
            "STORAGE__LOCATIONS__0__NAME": "cold",
            "STORAGE__LOCATIONS__0__BUCKET": "7",
            "ENCRYPTION__KEYS_K2026": "/etc/k2026",
            "ENCRYPTION__CURRENT": "k2026",
        },
        "",
    )
    assert config.upstream.sasl is not None
    assert (config.upstream.sasl.username, config.upstream.sasl.credentials().password) == ("17", "0123")
    assert config.storage is not None
    assert config.storage.plain_settings() == {"secret.access.key": "x"}
    assert config.storage.locations[0].plain_settings() == {"bucket": "7"}
    assert list(config.encryption.keys) == ["k2026"]


def test_variables_of_other_programs_and_services_do_not_count() -> None:
    environ = {"TIDEGATE_CONFIG": "x", "TIDEGATE_": "y", "HOME": "/", "TIDEGATE_ADMIN_PORT": "tcp://10.0.0.1:9190"}
    environ |= {"TIDEGATE_ADMIN_SERVICE_HOST": "10.0.0.1", "TIDEGATE_PORT_9092_TCP_ADDR": "10.0.0.2"}
    assert parse_config_text(FILE, TidegateConfig, "f.toml", environ) == parsed({})


def test_a_variable_with_too_few_underscores_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"TIDEGATE_ADMIN_PORT: .* did you mean TIDEGATE__ADMIN__PORT"):
        parse_config_text(FILE, TidegateConfig, "f.toml", {"TIDEGATE_ADMIN_PORT": "9190"})


def test_a_job_leaves_the_settings_of_proxies_alone() -> None:
    environ = {"TIDEGATE__LISTENER__BOOTSTRAP_PORT": "x", "TIDEGATE__WORKERS": "y"}
    environ["TIDEGATE__REMOTE_LOG_READER_THREADS"] = "7"
    assert parse_config_text(FILE, PipelineConfig, "f.toml", environ).remote_log.reader_threads == 7


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("UPSTREAM__BOOTSTRAP_SERVER", "a:1", "no such setting; did you mean TIDEGATE__UPSTREAM__BOOTSTRAP_SERVERS?"),
        ("TOPICS__0__LOCAL_RETENTION_M", "1h", "did you mean TIDEGATE__TOPICS__0__LOCAL_RETENTION_MS?"),
        ("LISTENER__1__BASE_PRT", "1", "did you mean TIDEGATE__LISTENER__1__BASE_PORT?"),
        ("LISTENER__BASE_PRT", "1", "did you mean TIDEGATE__LISTENER__BASE_PORT?"),
        ("TOPICS__LOCAL_RETENTION_M", "1h", "did you mean TIDEGATE__TOPICS__0__LOCAL_RETENTION_MS?"),
        ("BOOTSTRAP_SERVERS", "a:1", "no such setting; did you mean TIDEGATE__UPSTREAM__BOOTSTRAP_SERVERS?"),
        ("FOO", "1", "there is no such setting"),
        ("UPSTREAM", "1", "there is no such setting"),
        ("", "1", "there is no such setting"),
        ("LISTENER__BOOTSTRAP_PORT", "99999", "[listener] bootstrap.port: Input should be less than 65536"),
        ("TOPICS__NAME", "x", "[[topics]] is a list: name an entry, as in TIDEGATE__TOPICS__0__KEY"),
        ("TOPICS__2__NAME", "x", "entry 2 would leave a hole: there are only 1 before it"),
        ("UPSTREAM__SASL__PASSWORD_FILE", "/none", "[upstream.sasl]"),
    ],
)
def test_a_mistake_names_the_variable(name: str, value: str, said: str) -> None:
    (line, *more) = mistakes({name: value})
    assert not [other for other in more if "missing key" not in other]
    assert said in line
    assert line.startswith((f"TIDEGATE__{name}: ", "f.toml: [upstream.sasl]"))


def test_a_variable_may_name_one_of_several_listeners() -> None:
    several = FILE.replace("[listener]", "[[listener]]") + "[[listener]]\nbootstrap.port = 9093\n"
    ports = [{"LISTENER__BOOTSTRAP_PORT": "7", "LISTENER__1__ADVERTISED_HOST": "b"}, {"LISTENER__1__BASE_PORT": "7"}]
    first, second = (parsed(environ, several).listener for environ in ports)
    assert [(each.bootstrap_port, each.advertised_host) for each in first] == [(7, "localhost"), (9093, "b")]
    assert [each.base_port for each in second] == [9100, 7]
