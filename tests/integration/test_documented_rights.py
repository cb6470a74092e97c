"""The rights that docs/first-start.md gives to the proxy are enough to copy and to trim."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from tests.support.documents import shell_commands
from tests.support.repository import ROOT
from tests.support.rigs.security_rig import half_trimmed, proxy_before, section
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import filled_topic
from tests.support.servers.secure_kafka import TIMEOUT_S, add_rights

pytestmark = [pytest.mark.integration, pytest.mark.full]

RESOURCES = {
    "--topic": ResourceType.TOPIC,
    "--group": ResourceType.GROUP,
    "--transactional-id": ResourceType.TRANSACTIONAL_ID,
}
_DESCRIBE_CLUSTER = ResourceType.BROKER, AclOperation.DESCRIBE
_UNKNOWN = "a broker does not answer how large its logs are"
_KNOWN = "the broker answers again how large its logs are"
OPERATIONS = {operation.name.replace("_", "").lower(): operation for operation in AclOperation}


def documented_rights(principal: str, topics: str) -> list[AclBinding]:
    """Returns what the commands of the page would add, for this principal, and for topics that begin with `topics`."""
    rights: list[AclBinding] = []
    commands = [each for each in shell_commands(ROOT / "docs/first-start.md") if each.startswith("kafka-acls.sh")]
    assert commands
    for command in commands:
        words = [topics if word == "orders-" else word.strip("'") for word in command.split()]
        pairs = list(itertools.pairwise(words))
        is_prefix = ("--resource-pattern-type", "prefixed") in pairs
        pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
        places = [(RESOURCES[option], name, pattern) for option, name in pairs if option in RESOURCES]
        if "--cluster" in words:
            places.append((ResourceType.BROKER, "kafka-cluster", ResourcePatternType.LITERAL))
        operations = [OPERATIONS[name.lower()] for option, name in pairs if option == "--operation"]
        rights += [
            AclBinding(*place, principal, "*", operation, AclPermissionType.ALLOW)
            for place in places
            for operation in operations
        ]
    return rights


def test_the_documented_rights_are_enough(
    secured: KafkaCluster, authority: Authority, tmp_path: Path, topic_name: str
) -> None:
    """Without DESCRIBE on the cluster, brokers do not answer the sizes of logs, and few records are copied at once."""
    name = f"rights-{topic_name[-8:]}"
    topics = few, many = [f"{name}-few", f"{name}-many"]
    rights = documented_rights(f"User:CN={name}", f"{name}-")
    of_cluster = [each for each in rights if (each.restype, each.operation) == _DESCRIBE_CLUSTER]
    add_rights(secured, [each for each in rights if each not in of_cluster])
    filled_topic(secured.bootstrap_servers, few, 10)
    more = section("upstream.tls", {"ca": authority.ca, "certificate": authority.identity(name)})
    more += section("listener.tls", {"certificate": authority.identity("served")})
    settings = {"remote.log.metadata.topic.name": "__remote_log_metadata"}
    proxy = proxy_before(secured, tmp_path / name, "SSL", more, topics, settings)
    with proxy:
        until(lambda: any((tmp_path / name / "tier").rglob("*.log")))
        assert _UNKNOWN in proxy.output.read_text()
        add_rights(secured, of_cluster)
        until(lambda: _KNOWN in proxy.output.read_text())
        assert half_trimmed(secured, many).local_log_start > 0
    arguments = [sys.executable, "-m", "proxy", "check", "--config", str(proxy.config)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert [line for line in done.stdout.splitlines() if " lacks " in line] == []


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
