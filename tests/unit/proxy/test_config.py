"""The settings file: each mistake is one line, and no message shows a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from proxy.commands.config_reference import reference
from proxy.config import TidegateConfig, load_config
from proxy.handlers.base import FetchSettings
from tests.support.proxy.parsed_config import parse_config
from tiers.config.settings import RemoteLogConfig
from tiers.config.tier_config import ConfigError
from tiers.config.topic_settings import TIER_DEFAULTS

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = '[upstream]\nbootstrap.servers = "a:9092, b:9093"\n'


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(text, "f.toml")
    return str(raised.value).splitlines()


def test_the_reference_page_is_up_to_date() -> None:
    written, mark, generated = (
        (ROOT / "docs/configuration.md").read_text().partition("<!-- generated from the code -->\n")
    )
    assert generated == reference(), f"python -m proxy.commands.config_reference prints what follows {mark}"
    settings = re.findall(r"^\| `([\w.]+)` \| `(\S+)` \|", written, re.MULTILINE)
    assert dict(settings) == TIER_DEFAULTS


def test_an_upstream_alone_is_enough_to_pass_through() -> None:
    config = parse_config(UPSTREAM)
    assert not config.is_tiered
    assert config.upstream.bootstrap_servers == (("a", 9092), ("b", 9093))


def test_load_balancers_are_named_by_networks() -> None:
    config = parse_config(UPSTREAM + '[listener]\nproxy.protocol.trusted.networks = ["10.1.0.0/16", "::1"]')
    assert config.listener[0].proxy_protocol_trusted_networks == (ip_network("10.1.0.0/16"), ip_network("::1/128"))
    assert parse_config(UPSTREAM).listener[0].proxy_protocol_trusted_networks == ()


def test_founding_names_are_accepted() -> None:
    config = parse_config(
        "rlm_process_interval_ms = 5\nrlm_retry_interval_ms = 6\nremote.log.storage.enable = false\n" + UPSTREAM
    )
    assert (config.remote_log.task_interval_ms, config.remote_log.task_retry_backoff_ms) == (5, 6)
    assert not config.remote_log.enabled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing section [upstream]"),
        (UPSTREAM + "[topics]\nname = 'x'", "[topics] is a list: write [[topics]] for each of its entries"),
        ("remote.log.reader.thread = 3\n" + UPSTREAM, "did you mean remote.log.reader.threads?"),
        ("remote.log.reader.threads = true\n" + UPSTREAM, "expected a number, not a boolean"),
        (
            UPSTREAM + "[[topics]]\npattern = 'a-*'\n[[topics]]\npattern = 'b-*'\nlocal.retention.ms = '6 moons'",
            '[[topics]] number 2 (pattern "b-*") local.retention.ms = "6 moons": expected a number of milliseconds, or',
        ),
        (UPSTREAM + "[[listener]]\n[[listener]]\nbootstrap.port = 0", "[[listener]] number 2 bootstrap.port: Input"),
        (
            "remote.log.manager.task.interval.ms = 5\nrlm_process_interval_ms = 6\n" + UPSTREAM,
            "rlm_process_interval_ms: this is another name of remote.log.manager.task.interval.ms",
        ),
        (
            UPSTREAM + "[[topics]]\nname = 'x'\nremote.log.retention.ms = 5",
            '[[topics]] number 1 (name "x") remote.log.retention.ms; use remote.log.retention.minutes in',
        ),
        ("log.retention.bytes = 5\n" + UPSTREAM, "it is a setting of the brokers"),
        ("remote.log.retention.minutes = 5\n" + UPSTREAM, "it belongs in [[topics]]"),
        (UPSTREAM + "[listner]\nhost = 'x'", "unknown key listner.host; did you mean [listener]?"),
        (
            UPSTREAM + "[listener]\nproxy.protocol.trusted.networks = ['10.1.0.1/16']",
            "10.1.0.1/16 has host bits set; a network is written as 10.1.0.0/16",
        ),
        (UPSTREAM + "[admin]\nport = 70000", "[admin] port: Input should be less than 65536"),
        ("[upstream]\nbootstrap.servers = 'nowhere'", "[upstream] bootstrap.servers: expected host:port"),
        (UPSTREAM + "[listener]\nhost = 'a b'", "[listener] host: 'a b' is not a host name or an IP address"),
        (UPSTREAM + "[[topics]]\nname = 'x'", "there is no [storage]"),
        (UPSTREAM + "[encryption]\ncurrent = 'k2'\nkeys.k1 = '/k'", "current: there is no key 'k2' in keys"),
        ("x = ", "f.toml: not TOML"),
        (UPSTREAM + "[admin]\nport = 1\nport = 2", "f.toml: not TOML: the key port is set twice"),
        (
            UPSTREAM + "[upstream.sasl]\npassword = 'hush'\npassword.file = '/hush'",
            "not TOML: password.file and password are both set: remove one of them (at end",
        ),
        (UPSTREAM + "[admin]\nport = 1\nport.x = 2", "or is also the first part of another key"),
        (
            UPSTREAM + "[[listener]]\nbootstrap.port = 1\n[[listener]]\nbootstrap.port = 2\n[listener.tls]\nkey = '/k'",
            "missing key [[listener]] number 2: [listener.tls] certificate",
        ),
    ],
)
def test_every_mistake_is_one_line(text: str, said: str) -> None:
    (line,) = mistakes(text)
    assert said in line
    assert line.startswith("f.toml: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        load_config(tmp_path / "nothing.toml")


def test_no_key_is_the_first_part_of_another_key() -> None:
    """TOML refuses `a = 1` beside `a.b = 2`: a file could not set both."""
    for section in TidegateConfig.section_models():
        keys = TidegateConfig.keys_of(section)
        assert not [(key, other) for key in keys for other in keys if other.startswith(f"{key}.")]


def test_a_secret_can_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    secret, sasl = tmp_path / "secret", UPSTREAM + '[upstream.sasl]\nmechanism = "PLAIN"\nusername = "u"\n'
    secret.write_text("s3cret\n")
    config = parse_config(f'{sasl}password.file = "{secret}"\n')
    assert config.upstream.sasl is not None
    assert config.upstream.sasl.credentials().password == "s3cret"
    assert mistakes(f'{sasl}password.file = "{tmp_path}/none"') == [
        f"f.toml: [upstream.sasl]: password.file: {tmp_path}/none: No such file or directory"
    ]
    secret.write_text("\n")
    assert mistakes(f'{sasl}password.file = "{secret}"') == [
        f"f.toml: [upstream.sasl]: password.file: {secret} is empty"
    ]


def test_secrets_show_nowhere() -> None:
    text = UPSTREAM + "[storage]\nimplementation = 's3'\nsecret.access.key = 'hush'\npath.style = true\n"
    config = parse_config(text)
    assert "hush" not in repr(config)
    assert "hush" not in str(config.model_dump())
    assert "hush" not in config.model_dump_json()
    assert config.storage is not None
    assert config.storage.plain_settings() == {"secret.access.key": "hush", "path.style": "true"}
    (line,) = mistakes(UPSTREAM + "[storage]\nsecret.access.key = 'hush'\n")
    assert "hush" not in line


def test_tls_and_sasl_are_sections_of_their_own_and_keep_their_secrets() -> None:
    config = parse_config(
        f"""{UPSTREAM}[upstream.tls]
[upstream.sasl]
mechanism = "PLAIN"
username = "ann"
password = "s3cr3t"
[listener.tls]
certificate = "/c.pem"
key = "/k.pem"
password = "s3cr3t"
"""
    )
    assert config.upstream.tls is not None
    assert config.upstream.sasl is not None
    assert config.upstream.sasl.credentials().password == "s3cr3t"
    assert config.listener[0].tls is not None
    assert "s3cr3t" not in repr(config)
    assert parse_config(UPSTREAM).upstream.tls is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[upstream.sasl]\nmechanism = "PLAIN"\npassword = "s3cr3t"', "PLAIN takes username and password"),
        ('[upstream.sasl]\nmechanism = "OAUTHBEARER"\npassword = "s3cr3t"', "OAUTHBEARER takes token.file"),
        ('[upstream.sasl]\nmechanism = "GSSAPI"', "[upstream.sasl] mechanism: Input should be 'PLAIN'"),
        ('[upstream.tls]\nkey = "k"', "there is a key without a certificate"),
        ('[listener.tls]\ncertificate = "c"\nclient.ca = "a"', "client.auth and client.ca go together"),
        ("[listener.tls]", "missing key [listener.tls] certificate"),
    ],
)
def test_half_of_what_security_needs_is_a_mistake(text: str, said: str) -> None:
    lines = mistakes(UPSTREAM + text)
    assert any(said in line for line in lines), lines
    assert "s3cr3t" not in "".join(lines)


def documented() -> Iterator[tuple[str, str, str]]:
    """Yields the section, the key and the default of every row of the reference page that is a key of the file."""
    section: str | None = None
    for line in (ROOT / "docs/configuration.md").read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ").strip("`")
            section = {"Top of the file": "", "Settings of one topic, through the proxy": None}.get(title, title)
        elif section is not None and line.startswith("| `"):
            key, default = line.split(" | ")[:2]
            yield section, key.removeprefix("| ").strip("`"), default.strip().strip("`")


WHOLE = """
[upstream]
bootstrap.servers = "a:1"
[upstream.tls]
[upstream.sasl]
mechanism = "PLAIN"
username = "u"
password = "p"
[listener.tls]
certificate = "c"
[storage]
implementation = "local"
[[storage.locations]]
name = "east"
[[topics]]
name = "x"
"""
"""Every section with the keys that have no default."""


ROWS = list(documented())


def with_line(section: str, line: str) -> str:
    if not section:
        return f"{line}\n{WHOLE}"
    head = f"{section}\n"
    return WHOLE.replace(head, f"{head}{line}\n") if head in WHOLE else f"{WHOLE}{head}{line}\n"


def test_the_documented_keys_are_known_and_have_their_defaults() -> None:
    others: list[str] = []
    for section, key, default in ROWS:
        # An empty implementation of a location means that of [storage].
        if default not in ("", "*required*") and key != "implementation":
            assumed = parse_config(with_line(section, ""))
            others += [key] * (parse_config(with_line(section, f"{key} = {default}")) != assumed)
        elif default != "*required*":
            a_date = "1979-05-27"  # which no setting takes
            others += [line for line in mistakes(with_line(section, f"{key} = {a_date}")) if "unknown key" in line]
    assert others == []


@pytest.mark.parametrize("text", ["task_interval_ms = 5\n" + UPSTREAM, UPSTREAM + "[limits]\nmax_connections = 5"])
def test_the_name_of_a_field_is_no_key(text: str) -> None:
    (line,) = mistakes(text)
    assert "unknown key" in line


@pytest.mark.parametrize(("owner_ms", "proxy_ms"), [(10_000, 60_000), (60_000, 1_000)])
def test_an_owner_waits_for_the_reads_of_proxies_with_another_setting(owner_ms: int, proxy_ms: int) -> None:
    """An operator changes the setting in one proxy after the other."""
    owner, proxy = RemoteLogConfig(visible_after_ms=owner_ms), RemoteLogConfig(visible_after_ms=proxy_ms)
    assert FetchSettings(proxy).metadata_max_age_ms <= owner.visible_after_ms // 2
    assert FetchSettings(proxy).metadata_max_age_ms == min(proxy_ms // 2, 5_000)


TWO_LISTENERS = f"""{UPSTREAM}
[[listener]]
advertised.host = "inside"
[[listener]]
bootstrap.port = 9093
brokers.by = "sni"
advertised.host = "broker-{{id}}.example.org"
advertised.port = 443
[listener.tls]
certificate = "/c.pem"
"""


def test_one_listener_or_several() -> None:
    for text, hosts in (
        (UPSTREAM, ["localhost"]),
        (UPSTREAM + '[listener]\nadvertised.host = "a"', ["a"]),
        (TWO_LISTENERS, ["inside", "broker-{id}.example.org"]),
    ):
        assert [each.advertised_host for each in parse_config(text).listener] == hosts
    inside, outside = parse_config(TWO_LISTENERS).listener
    assert inside.tls is None
    assert outside.tls is not None


@pytest.mark.parametrize(
    ("listener", "mistake"),
    [
        ('brokers.by = "sni"\nadvertised.host = "b{id}"', "needs a [listener.tls]"),
        ('brokers.by = "sni"\n[listener.tls]\ncertificate = "/c"', "needs {id} in advertised.host"),
        (
            'brokers.by = "sni"\nadvertised.host = "b{id}"\nadvertised.base.port = 7\n[listener.tls]\ncertificate = ""',
            'is for brokers.by = "port"',
        ),
        ('advertised.host = "b{id}"\nadvertised.base.port = 7\nadvertised.port = 7', "remove one of them"),
        ("advertised.port = 7", "put {id} into advertised.host"),
        ('advertised.host = "{id}-{id}"', "once"),
        ('advertised.host = "0.0.0.0"', "no client can connect to 0.0.0.0"),
        ("[[listener]]", "two listeners have 0.0.0.0:9092"),
        ("bootstrap.port = 9190", "admin.port and listener.bootstrap.port are both 9190"),
    ],
)
def test_a_listener_that_cannot_work_is_explained(listener: str, mistake: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(mistake)):
        parse_config(f"{UPSTREAM}[[listener]]\n{listener}")
