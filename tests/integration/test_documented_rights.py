"""The rights that docs/first-start.md gives to the proxy are enough to copy and to trim."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from tests.support.documents import shell_commands
from tests.support.repository import ROOT
from tests.support.rigs.security_rig import half_trimmed, proxy_before, section
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.secure_kafka import TIMEOUT_S, add_rights

pytestmark = [pytest.mark.integration, pytest.mark.full]

RESOURCES = {
    "--topic": ResourceType.TOPIC,
    "--group": ResourceType.GROUP,
    "--transactional-id": ResourceType.TRANSACTIONAL_ID,
}
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
    name = f"rights-{topic_name[-8:]}"
    topic = f"{name}-topic"
    add_rights(secured, documented_rights(f"User:CN={name}", f"{name}-"))
    more = section("upstream.tls", {"ca": authority.ca, "certificate": authority.identity(name)})
    more += section("listener.tls", {"certificate": authority.identity("served")})
    settings = {"remote.log.metadata.topic.name": "__remote_log_metadata"}
    proxy = proxy_before(secured, tmp_path / name, "SSL", more, [topic], settings)
    with proxy:
        assert half_trimmed(secured, topic).local_log_start > 0
        assert "a broker does not answer how large its logs are" not in proxy.output.read_text()
    arguments = [sys.executable, "-m", "proxy", "check", "--config", str(proxy.config)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert [line for line in done.stdout.splitlines() if " lacks " in line] == []
