"""What `tidegate check` says about files of the settings, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from proxy.commands import check as check_module
from proxy.commands.check import advertised_problems, check
from proxy.commands.topic_check import TopicFindings
from proxy.config import TidegateConfig
from proxy.process.start.settings_in_use import settings_in_use
from proxy.wire.server import bind
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.ports import free_ports

HOST = "127.0.0.1"


def config_with_ports(broker: ScriptedBroker, ports: Sequence[int], more: str = "") -> TidegateConfig:
    bootstrap, of_broker, admin = ports
    return parse_config(f"""
[upstream]
bootstrap.servers = "{HOST}:{broker.port}"
[listener]
host = "{HOST}"
bootstrap.port = {bootstrap}
base.port = {of_broker - broker.node_id}
[admin]
port = {admin}
{more}
""")


async def test_an_unusable_guard_of_the_admin_port_is_a_problem(tmp_path: Path) -> None:
    token = tmp_path / "token"
    settings = f'[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\ntoken.file = "{token}"\n'
    assert f"[admin] token.file: {token}: No such file or directory" in (await check(parse_config(settings))).problems
    token.write_text("secret")
    certificate = tmp_path / "admin.pem"
    settings += f'[admin.tls]\ncertificate = "{certificate}"\n'
    said = [problem for problem in (await check(parse_config(settings))).problems if problem.startswith("[admin.tls]")]
    assert said == [f"[admin.tls] certificate: {certificate}: No such file or directory"]


async def test_the_addresses_at_every_listener_are_shown() -> None:
    async with ScriptedBroker(7) as broker:
        settings = f"""
[upstream]
bootstrap.servers = "127.0.0.1:{broker.port}"
[[listener]]
advertised.host = "inside"
[[listener]]
bootstrap.port = 9093
base.port = 9086
advertised.host = "outside"
advertised.base.port = 32000
[listener.tls]
certificate = "missing.pem"
[[listener]]
bootstrap.port = 9107
base.port = 9200
"""
        lines = list((await check(parse_config(settings))).lines())
    shown = f"broker 7: 127.0.0.1:{broker.port}, reached; advertised to clients as inside:9107 and outside:32007 and"
    assert [line for line in lines if line.startswith(shown) and line.endswith(", which this check does not try")]
    both = "broker 7 at 0.0.0.0:9092 and the bootstrap port of 0.0.0.0:9107"
    assert f"problem: [listener] port 9107 is {both}: change the ports of one of them" in lines
    trouble = "port 9093 is listener.bootstrap.port: change that setting or listener.base.port"
    assert f"problem: broker 7 has no address at 0.0.0.0:9093: {trouble}" in lines
    assert any(line.startswith("problem: 0.0.0.0:9093: [listener.tls] ") for line in lines)


STORE = '[storage]\nimplementation = "local"\npath = "{}"\n'
TOPICS = '[[topics]]\nname = "orders"\n'


@pytest.mark.parametrize(
    ("store", "more", "skipped"),
    [
        ("no/such/folder", "", "whether the metadata fits the store"),
        (".", "[listener.tls]\ncertificate = 'missing.pem'\n", None),
        (".", "[upstream.tls]\nca = 'missing.pem'\n", "the brokers, the proxy's rights, the topics"),
    ],
)
async def test_what_does_not_depend_on_a_problem_is_checked(
    store: str, more: str, skipped: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what was not checked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_module, "missing_permissions", AsyncMock(return_value=([], [])))
    monkeypatch.setattr(check_module, "metadata_topic_trouble", AsyncMock(return_value=None))
    monkeypatch.setattr(check_module, "topic_findings", AsyncMock(return_value=TopicFindings(rules=["a rule"])))
    async with ScriptedBroker(7) as broker:
        config = config_with_ports(broker, free_ports(3), more + STORE.format(store) + TOPICS)
        report = await check(config)
    lines = list(report.lines())
    assert [each for each in lines if each.startswith("problem: ")] != []
    found = [each.partition("problems: ")[2] for each in lines if each.startswith("not checked, because of these pro")]
    assert found == ([] if skipped is None else [skipped])
    assert (report.rules == []) == (skipped is not None and "the topics" in skipped)


@pytest.mark.parametrize(("sasl", "count"), [("", 1), ('[upstream.sasl]\nmechanism = "PLAIN"\nusername = "u"\n', 0)])
async def test_a_certificate_at_the_brokers_without_sasl_is_a_problem(sasl: str, count: int) -> None:
    """Then the brokers take each client for the proxy."""
    sasl += 'password = "p"\n' if sasl else ""
    settings = '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[upstream.tls]\ncertificate = "missing.pem"\n'
    problems = (await check(parse_config(settings + sasl))).problems
    said = [
        each for each in problems if each.startswith("[upstream.tls] certificate without [upstream.sasl]: the brok")
    ]
    assert (len(said), all("add [upstream.sasl]" in each for each in said)) == (count, True)


async def test_every_port_that_serve_will_bind_is_tried() -> None:
    ports = free_ports(3)
    async with ScriptedBroker(7) as broker:
        config = config_with_ports(broker, ports)
        free = list((await check(config)).lines())
        with ExitStack() as stack:
            for port in ports:
                stack.enter_context(closing(bind(HOST, port, reuse_port=True)))
            problems = (await check(config)).problems
    nothing = "nothing, because there is no [storage], or remote.log.storage.system.enable is false"
    assert free[-2:] == [f"tiered: {nothing}", "no problems"]
    bootstrap, of_broker, admin = (f"{HOST}:{port}: Address already in use" for port in ports)
    assert [each.partition(": free")[0] for each in problems] == [
        f"[listener] bootstrap.port: {bootstrap}",
        f"[listener] base.port: broker 7: {of_broker}",
        f"[admin] port: {admin}",
    ]


async def test_a_proxy_that_runs_has_its_ports(tmp_path: Path) -> None:
    ports, file = free_ports(3), tmp_path / "tidegate.toml"
    async with ScriptedBroker(7) as broker:
        config = config_with_ports(broker, ports)
        with closing(bind(HOST, ports[0], reuse_port=False)):
            with settings_in_use(file):
                running = await check(config, file)
            stopped = (await check(config, file)).problems
    assert [each for each in stopped if each.startswith("[listener]")] != []
    assert [each for each in running.problems if each.startswith("[listener]")] == []
    assert "ports: not tried, because a process serves by these settings now" in running.lines()


@pytest.mark.parametrize(
    ("listener", "count"), [("", 1), ('advertised.host = "localhost"', 0), ('host = "127.0.0.1"', 0)]
)
def test_a_listener_for_other_machines_needs_an_advertised_host(listener: str, count: int) -> None:
    config = parse_config(f'[upstream]\nbootstrap.servers = "{HOST}:1"\n[listener]\n{listener}\n')
    assert len(list(advertised_problems(config.listener))) == count
