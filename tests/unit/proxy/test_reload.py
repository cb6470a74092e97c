"""A reload applies the log level and the limits, and names what needs a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from proxy.config import LimitsConfig, TidegateConfig
from proxy.logging_setup import set_level
from proxy.process.reload import Reload, Reloaded, changed_keys
from proxy.process.remote_reader import change_fetch_quotas
from proxy.wire.admission import Admission, Admissions, Limit
from tests.support.proxy.parsed_config import parse_config
from tiers.config.tier_config import ConfigError
from tiers.quota import RemoteFetchQuotas

BASE = """
[upstream]
bootstrap.servers = "a:1"
[storage]
implementation = "local"
path = "tier"
[[topics]]
name = "orders"
"""


def reloaded(before: str, after: str | Callable[[], TidegateConfig]) -> tuple[Reloaded, list[TidegateConfig]]:
    applied: list[TidegateConfig] = []
    load = (lambda: parse_config(after)) if isinstance(after, str) else after
    return Reload(parse_config(before), load, applied.append)(), applied


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("", []),
        ('[log]\nlevel = "debug"', ["[log] level"]),
        ("[limits]\nmax.connections = 7", ["[limits] max.connections"]),
        ('[[topics]]\nname = "payments"', ["[[topics]]"]),
        ('[[listener]]\nadvertised.host = "b"', ["[[listener]]"]),
        ("[upstream.tls]", ["[upstream.tls]"]),
        ('[state]\npath = "elsewhere"', ["[state] path"]),
    ],
)
def test_the_settings_that_differ_are_named(change: str, keys: list[str]) -> None:
    assert list(changed_keys(parse_config(BASE), parse_config(BASE + change))) == keys
    assert list(changed_keys(parse_config("workers = 2\n" + BASE), parse_config(BASE))) == ["workers"]
    top = "remote.log.reader.threads = 3\n" + BASE
    assert list(changed_keys(parse_config(BASE), parse_config(top))) == ["remote.log.reader.threads"]


def test_only_some_settings_apply_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    change = "[limits]\nmax.connections = 7\nheld.remote.responses.max.bytes = 1\n"
    result, (config,) = reloaded(BASE, BASE + change + '[log]\nlevel = "error"\n[[topics]]\nname = "b"')
    assert result == Reloaded(
        ("[log] level", "[limits] max.connections"), ("[[topics]]", "[limits] held.remote.responses.max.bytes")
    )
    base = parse_config(BASE)
    assert config == base.model_copy(
        update={
            "limits": base.limits.model_copy(update={"max_connections": 7}),
            "log": base.log.model_copy(update={"level": "error"}),
        }
    )
    assert [record.getMessage() for record in caplog.records] == [
        "the settings are reloaded: changed [log] level, [limits] max.connections",
        "these changed settings need a restart: [[topics]], [limits] held.remote.responses.max.bytes",
    ]


def test_a_change_that_needs_a_restart_is_named_every_time(caplog: pytest.LogCaptureFixture) -> None:
    reload = Reload(parse_config(BASE), lambda: parse_config(BASE + '[[topics]]\nname = "b"'), lambda _: None)
    assert reload() == reload() == Reloaded(need_restart=("[[topics]]",))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "these changed settings need a restart: [[topics]]"
    ] * 2


def test_wrong_settings_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> TidegateConfig:
        raise ConfigError("f.toml: unknown key x")

    assert reloaded(BASE, load) == (Reloaded(mistake="f.toml: unknown key x"), [])
    assert "the settings are not reloaded, because they are wrong: f.toml: unknown key x" in caplog.text


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_the_level_changes_for_all_loggers(root_level: None) -> None:
    set_level("error")
    assert not logging.getLogger("proxy.x").isEnabledFor(logging.WARNING)
    set_level("debug")
    assert logging.getLogger("proxy.x").isEnabledFor(logging.DEBUG)


async def test_a_lower_limit_of_connections_ends_none() -> None:
    ended: list[Limit] = []
    admissions = Admissions(3, 0, 0, LimitsConfig().connection_setup_timeout_ms)
    places = [admissions.admit("a", ended.append) for _ in range(3)]
    for place in places:
        assert isinstance(place, Admission)
        place.prove()
    admissions.change_limits(2, 0, 0, 1000)
    assert ended == []
    assert admissions.admit("a", ended.append) is Limit.CONNECTIONS
    admissions.change_limits(4, 0, 0, 1000)
    assert isinstance(admissions.admit("a", ended.append), Admission)


def test_the_fetch_quotas_apply_at_once() -> None:
    quotas = "remote.log.manager.fetch.max.bytes.per.second = 5\nremote.log.manager.fetch.quota.window.num = 1\n"
    copying = "remote.log.manager.copy.max.bytes.per.second = 5\n"
    per_client = "[limits]\nremote.fetch.max.bytes.per.second = 6\n"
    _, (config,) = reloaded(BASE, quotas + copying + BASE + per_client)
    assert config == parse_config(quotas + BASE + per_client)
    known = RemoteFetchQuotas(lambda: 0)
    assert known.reserve("orders", "client", 1_000) is not None
    change_fetch_quotas(known, config)
    assert known.reserve("orders", "client", 1_000) is not None
    assert known.reserve("orders", "client", 1) is None
    change_fetch_quotas(known, parse_config(BASE))
    assert known.reserve("orders", "client", 1) is not None
