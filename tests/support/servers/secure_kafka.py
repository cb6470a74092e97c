"""A Kafka with authentication: a listener per security protocol, users, and rights that a test must add.

The plain listener is for the test itself: a client of that listener may do everything, and so may the user `tidegate`.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster

PROTOCOLS = ("SASL_PLAINTEXT", "SASL_SSL", "SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
PROXY = "tidegate"
USERS: Mapping[str, str] = {
    PROXY: "proxy-s3cr3t",
    "alice": "alice-s3cr3t",
    "bob": "bob-s3cr3t",
    "carol": "carol-s3cr3t",
    "odd=na,me": "o,d=d",
}
"""The passwords by user name, for every mechanism that uses passwords. The tests add the users' rights."""

REAUTHENTICATION_MS = 4_000
"""The lifetime of a session of SASL_PLAINTEXT."""
TIMEOUT_S = 300.0
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "OAUTHBEARER": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule",
}


def secure_kafka(authority: Authority) -> KafkaCluster:
    """Returns a cluster that is not started yet. Call `add_users` after the start."""
    settings = {
        **SHRINKS_SOON,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{PROXY};User:CN={PROXY}",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.identity("broker")),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.ca),
        "listener.name.ssl.ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]*).*$/CN=$1/",
    }
    for protocol in ("sasl_plaintext", "sasl_ssl"):
        for mechanism, module in _LOGIN_MODULES.items():
            prefix = f"listener.name.{protocol}.{mechanism.lower()}"
            settings[f"{prefix}.sasl.jaas.config"] = f"{module} required{_options(mechanism)};"
            if protocol == "sasl_plaintext":
                settings[f"{prefix}.connections.max.reauth.ms"] = str(REAUTHENTICATION_MS)
    return KafkaCluster(settings=settings, advertised_host="localhost", secure=PROTOCOLS, java_options=SHORT_LIVED)


def _options(mechanism: str) -> str:
    if mechanism == "PLAIN":
        return "".join(f' user_{name}="{password}"' for name, password in USERS.items() if "=" not in name)
    return ' unsecuredLoginStringClaim_sub="broker"' if mechanism == "OAUTHBEARER" else ""


def add_users(cluster: KafkaCluster) -> None:
    """Adds the users. All may use the group `unused`: librdkafka's consumer needs a group, though it joins none."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    changes = [
        UserScramCredentialUpsertion(name, ScramCredentialInfo(mechanism, 4096), password.encode())
        for name, password in USERS.items()
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
    ]
    for change in changes:  # a request may name each user only once
        for done in admin.alter_user_scram_credentials([change]).values():
            done.result(TIMEOUT_S)
    _allow(cluster, "*", ResourceType.GROUP, "unused", [AclOperation.READ])


def allow(
    cluster: KafkaCluster, user: str, topic: str, operations: Sequence[AclOperation], *, is_prefix: bool = False
) -> None:
    _allow(cluster, user, ResourceType.TOPIC, topic, operations, is_prefix=is_prefix)


def allow_all(cluster: KafkaCluster, user: str) -> None:
    """Gives a user all rights, except the denied ones."""
    for kind, name in (
        (ResourceType.TOPIC, "*"),
        (ResourceType.GROUP, "*"),
        (ResourceType.TRANSACTIONAL_ID, "*"),
        (ResourceType.BROKER, "kafka-cluster"),
    ):
        _allow(cluster, user, kind, name, [AclOperation.ALL])


def deny(cluster: KafkaCluster, user: str, topic: str, operations: Sequence[AclOperation]) -> None:
    _allow(cluster, user, ResourceType.TOPIC, topic, operations, AclPermissionType.DENY)


def _allow(
    cluster: KafkaCluster,
    user: str,
    kind: ResourceType,
    name: str,
    operations: Sequence[AclOperation],
    permission: AclPermissionType = AclPermissionType.ALLOW,
    *,
    is_prefix: bool = False,
) -> None:
    pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
    add_rights(
        cluster,
        [AclBinding(kind, name, pattern, f"User:{user}", "*", each, permission) for each in operations],
    )


def add_rights(cluster: KafkaCluster, rights: Sequence[AclBinding]) -> None:
    """Adds rights. Returns when they are in effect: the broker learns of them shortly after the controller."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for done in admin.create_acls(list(rights)).values():
        done.result(TIMEOUT_S)
    anything: Any = None
    everything = AclBindingFilter(
        ResourceType.ANY,
        anything,
        ResourcePatternType.ANY,
        anything,
        anything,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while missing := set(rights) - set(admin.describe_acls(everything).result(TIMEOUT_S)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the broker does not know {missing}")
        time.sleep(0.02)


def token(user: str, lifetime_s: float = 3600.0) -> str:
    """Returns an unsecured token (RFC 7515, appendix A.5), which Kafka's development validator accepts."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": user, "iat": now, "exp": now + lifetime_s})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def write_token(file: Path, user: str) -> Path:
    file.write_text(token(user) + "\n")
    return file
