"""What `tidegate check` says about files of the settings, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.commands.check import check
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.proxy.parsed_config import parse_config


async def test_an_unusable_guard_of_the_admin_port_is_a_problem(tmp_path: Path) -> None:
    token = tmp_path / "token"
    settings = f'[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\ntoken.file = "{token}"\n'
    assert f"[admin] token.file: {token}: No such file or directory" in (await check(parse_config(settings))).problems
    token.write_text("secret")
    certificate = tmp_path / "admin.pem"
    settings += f'[admin.tls]\ncertificate = "{certificate}"\n'
    said = [problem for problem in (await check(parse_config(settings))).problems if problem.startswith("[admin")]
    assert said == [f"[admin.tls] {certificate}: No such file or directory"]


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
"""
        lines = list((await check(parse_config(settings))).lines())
    shown = f"broker 7: 127.0.0.1:{broker.port}, reached; advertised to clients as inside:9107 and outside:32007,"
    assert f"{shown} which this check does not try" in lines
    trouble = "port 9093 is listener.bootstrap.port: change one of the two settings"
    assert f"problem: broker 7 has no address at 0.0.0.0:9093: {trouble}" in lines
    assert any(line.startswith("problem: [listener.tls] ") for line in lines)


async def test_a_port_of_two_listeners_is_a_problem() -> None:
    async with ScriptedBroker(7) as broker:
        settings = f"""
[upstream]
bootstrap.servers = "127.0.0.1:{broker.port}"
[[listener]]
[[listener]]
bootstrap.port = 9107
base.port = 9200
"""
        problems = (await check(parse_config(settings))).problems
    both = "broker 7 at 0.0.0.0:9092 and the bootstrap port of 0.0.0.0:9107"
    assert problems == [f"[listener] port 9107 is {both}: change the ports of one of them"]


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
