"""`check` and `serve` report wrong credentials of the proxy in one line, and `serve` ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin._acl import AclOperation

from tests.support.rigs.security_rig import (
    READ,
    TIMEOUT_S,
    eventually,
    for_kafka_python,
    proxy_before,
    read_by_kafka_python,
    sasl,
    section,
)
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import free_ports
from tests.support.servers.producing import create_topic, delete_topic, produce
from tests.support.servers.secure_kafka import PROXY, USERS, allow, allow_all, deny
from tiers.tasks.failed_deletions_topic import FAILED_DELETIONS_TOPIC

pytestmark = pytest.mark.integration

SECRETS = (*USERS.values(), "wr0ng", "eyJ")


def own(mechanism: str, user: str, password: str) -> str:
    return section("upstream.sasl", {"mechanism": mechanism, "username": user, "password": password})


def strangers_token(authority: Authority, home: Path) -> str:
    (home / "token").write_text("no.token.at-all")
    return section("upstream.sasl", {"mechanism": "OAUTHBEARER", "token.file": home / "token"})


def no_token(authority: Authority, home: Path) -> str:
    return section("upstream.sasl", {"mechanism": "OAUTHBEARER", "token.file": home / "none"})


def strangers_ca(authority: Authority, home: Path) -> str:
    return own("PLAIN", PROXY, USERS[PROXY]) + section("upstream.tls", {"ca": Authority(home / "stranger").ca})


def strangers_certificate(authority: Authority, home: Path) -> str:
    mine = Authority(home / "stranger").identity(PROXY)
    return section("upstream.tls", {"ca": authority.ca, "certificate": mine})


More = Callable[[Authority, Path], str]
CASES: dict[str, tuple[str, More, str]] = {
    "password": ("SASL_PLAINTEXT", lambda *_: own("PLAIN", PROXY, "wr0ng"), "[upstream.sasl]: Authentication failed"),
    "scram": ("SASL_PLAINTEXT", lambda *_: own("SCRAM-SHA-256", PROXY, "wr0ng"), "see username and password"),
    "user": ("SASL_PLAINTEXT", lambda *_: own("SCRAM-SHA-512", "nobody", "wr0ng"), "see username and password"),
    "token": ("SASL_PLAINTEXT", strangers_token, "see token.file"),
    "no token": ("SASL_PLAINTEXT", no_token, "none cannot be read: No such file"),
    "no tls": ("SASL_SSL", lambda *_: own("PLAIN", PROXY, USERS[PROXY]), "speaks TLS: set [upstream.tls]"),
    "ca": ("SASL_SSL", strangers_ca, "see [upstream.tls] ca"),
    "certificate": ("SSL", strangers_certificate, "see [upstream.tls] certificate"),
    "no certificate": ("SSL", lambda a, _: section("upstream.tls", {"ca": a.ca}), "see [upstream.tls] certificate"),
    "rights": (
        "SASL_PLAINTEXT",
        lambda *_: own("PLAIN", "carol", USERS["carol"]),
        "the user carol of [upstream.sasl] lacks CREATE, READ, WRITE, DESCRIBE_CONFIGS on topic __metadata-",
    ),
}


def run(command: str, config: Path) -> tuple[int, str, str]:
    """Runs the command. Repeats `check` if a broker did not answer in time, which says nothing about the settings."""
    arguments = [sys.executable, "-m", "proxy", command, "--config", str(config)]
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        is_late = command == "check" and re.search(r" in (time|\d+ ms)", done.stdout)
        if not is_late or time.monotonic() > deadline:
            return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_which_setting_is_wrong(
    case: str, secured: KafkaCluster, authority: Authority, tmp_path: Path
) -> None:
    protocol, more, said = CASES[case]
    proxy = proxy_before(secured, tmp_path / "x", protocol, more(authority, tmp_path))
    try:
        code, out, error = run("check", proxy.config)
        assert code == 1
        assert any(said in line for line in out.splitlines() if line.startswith("problem: ")), out
        assert error == ""
        assert not any(secret in out for secret in SECRETS)

        code, out, error = run("serve", proxy.config)
        assert code == 1
        (line,) = [line for line in error.splitlines() if line.startswith("tidegate: ")]
        assert said in line
        assert "Traceback" not in error
        assert not any(secret in error for secret in SECRETS)
    finally:
        proxy.stop()


def test_a_broker_without_tls_closes_as_one_that_goes_away(
    secured: KafkaCluster, authority: Authority, tmp_path: Path
) -> None:
    """Therefore `serve` retries. The message still names the setting to check."""
    more = section("upstream.tls", {"ca": authority.ca})
    proxy = proxy_before(secured, tmp_path / "x", "SASL_PLAINTEXT", more)
    code, out, _ = run("check", proxy.config)
    proxy.stop()
    assert code == 1
    assert "see [upstream.tls], does it speak TLS?" in out


def test_rights_that_tiered_topics_need_are_missed(secured: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    user = "odd=na,me"
    create_topic(secured.bootstrap_servers, topic_name)
    allow_all(secured, user)
    deny(secured, user, topic_name, [AclOperation.READ, AclOperation.DELETE])
    create_topic(secured.bootstrap_servers, FAILED_DELETIONS_TOPIC)
    deny(secured, user, FAILED_DELETIONS_TOPIC, [AclOperation.WRITE])
    more = own("SCRAM-SHA-256", user, USERS[user])
    proxy = proxy_before(secured, tmp_path / topic_name[-8:], "SASL_PLAINTEXT", more, [topic_name])
    code, out, _ = run("check", proxy.config)
    proxy.stop()
    delete_topic(secured.bootstrap_servers, FAILED_DELETIONS_TOPIC)
    assert code == 1
    who = f"the user {user} of [upstream.sasl]"
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    lacked = [("WRITE", FAILED_DELETIONS_TOPIC), ("READ", topic_name), ("DELETE", topic_name)]
    assert problems == [f"problem: {who} lacks {right} on topic {topic}" for right, topic in lacked]


def test_workers_end_as_one_process_does(secured: KafkaCluster, tmp_path: Path) -> None:
    more = own("PLAIN", PROXY, "wr0ng")
    proxy = proxy_before(secured, tmp_path / "x", "SASL_PLAINTEXT", more, settings={"workers": 2})
    try:
        code, _, error = run("serve", proxy.config)
        assert code == 1
        assert "[upstream.sasl]: Authentication failed" in error
        assert "Traceback" not in error
    finally:
        proxy.stop()


def test_a_broker_that_is_down_is_waited_for(secured: KafkaCluster, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    proxy = proxy_before(secured, tmp_path / "x", f"127.0.0.1:{port}", sasl("PLAIN", tmp_path))
    with proxy.output.open("wb") as output:
        arguments = [sys.executable, "-m", "proxy", "serve", "--config", str(proxy.config)]
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: "the cluster's metadata cannot be read" in proxy.output.read_text())
            code, out, _ = run("check", proxy.config)
            assert code == 1
            assert f"no broker answers at 127.0.0.1:{port}" in out
            assert process.poll() is None
        finally:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
            proxy.stop()


def test_credentials_that_end_later_are_an_alarm_and_asked_again(
    secured: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    """The proxy's own token becomes invalid: clients continue, and the proxy recovers when the token is valid again."""
    create_topic(secured.bootstrap_servers, topic_name)
    produce(secured.bootstrap_servers, topic_name, [b"hello"])
    allow(secured, "alice", topic_name, READ)
    home = tmp_path / f"later-{topic_name[-8:]}"
    with proxy_before(secured, home, "SASL_PLAINTEXT", sasl("OAUTHBEARER", tmp_path)) as proxy:
        good = (tmp_path / "token").read_text()
        (tmp_path / "token").write_text("no.token.at-all")
        # The session of a connection ends after a few seconds, and the next session needs the token.
        eventually(lambda: "the brokers reject the proxy" in proxy.output.read_text())
        assert not proxy.is_ready()
        alice = for_kafka_python("alice", "PLAIN")
        assert read_by_kafka_python(proxy.bootstrap_servers, topic_name, 1, alice) == [(0, b"hello")]
        (tmp_path / "token").write_text(good)
        proxy.wait_until_ready()
        assert "no.token.at-all" not in proxy.output.read_text()
