"""`tidegate check` compares the certificates of a listener with the advertised hosts, and with the time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from proxy.commands.certificate_check import certificate_findings
from proxy.commands.check import check
from proxy.listener_config import ListenerTlsConfig
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def findings(tls: dict[str, object], *hosts: str, now: datetime | None = None) -> tuple[list[str], list[str]]:
    return certificate_findings(ListenerTlsConfig.model_validate(tls), hosts, now or datetime.now(UTC))


def test_a_certificate_for_another_host_is_a_problem(authority: Authority) -> None:
    file = authority.identity("x", "kafka.example.org", "10.0.0.1")
    [problem], _ = findings({"certificate": file}, "kafka.example.org", "10.0.0.1", "broker-1.kafka.example.org")
    assert problem.startswith(
        f"{file} is for 10.0.0.1, kafka.example.org, and broker-1.kafka.example.org is advertised"
    )
    for_all = authority.identity("y", "*.kafka.example.org")
    assert findings({"certificate": for_all}, "Broker-1.kafka.example.org.")[0] == []
    assert len(findings({"certificate": for_all}, "a.b.kafka.example.org", "kafka.example.org")[0]) == 2


@pytest.mark.parametrize(("days", "problems", "warnings"), [(-90, 0, 0), (-29, 0, 1), (1, 1, 0), (-400_000, 1, 0)])
def test_a_certificate_is_valid_now_and_for_a_month(
    days: int, problems: int, warnings: int, authority: Authority
) -> None:
    file = authority.identity("x", "a")
    ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    found = findings({"certificate": file}, "a", now=ends + timedelta(days=days))
    assert (len(found[0]), len(found[1])) == (problems, warnings)
    for line in (*found[0], *found[1]):
        assert "is valid from " in line if days < -90 else f"on {ends:%Y-%m-%d %H:%M} UTC: replace the file" in line


async def test_the_check_compares_the_names_of_all_brokers(authority: Authority) -> None:
    file = authority.identity("x", "kafka.example.org")
    async with ScriptedBroker(7) as broker:
        settings = f"""
[upstream]
bootstrap.servers = "127.0.0.1:{broker.port}"
[listener]
advertised.host = "broker-{{id}}.kafka.example.org"
brokers.by = "sni"
[listener.tls]
certificate = "{file}"
"""
        problem, *_ = (await check(parse_config(settings))).problems
    assert problem.startswith(f"[listener.tls] {file} is for kafka.example.org, and broker-7.kafka.example.org is adv")
