"""The `kafka.*` options of a reader: the address of its Kafka and its identity there, with the names of Kafka's
clients.

Certificates are PEM files, which must exist on the executors too. Settings of Kafka's consumer that have no meaning
here (fetch sizes, session timeouts, ...) are accepted, and a warning says that they have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tiers.config.upstream_config import UpstreamConfig

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_JAAS_MODULES = ("PlainLoginModule", "ScramLoginModule", "OAuthBearerLoginModule")
_JAAS_OPTION = re.compile(r"""(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)')""")
_STORES = ("ssl.truststore", "ssl.keystore")
_IDENTITY = """
bootstrap.servers security.protocol sasl.mechanism sasl.jaas.config sasl.oauthbearer.token.endpoint.url
ssl.endpoint.identification.algorithm ssl.key.password ssl.keystore.certificate.chain ssl.keystore.location
ssl.keystore.type ssl.truststore.certificates ssl.truststore.location ssl.truststore.type
"""
IDENTITY = frozenset(_IDENTITY.split())
"""The address and the identity, without the prefix `kafka.`."""
_WITHOUT_EFFECT = """
allow.auto.create.topics auto.commit.interval.ms check.crcs client.dns.lookup client.id client.rack config.providers
connections.max.idle.ms default.api.timeout.ms enable.metrics.push exclude.internal.topics fetch.max.bytes
fetch.max.wait.ms fetch.min.bytes group.id group.instance.id group.protocol group.remote.assignor
heartbeat.interval.ms max.partition.fetch.bytes max.poll.interval.ms max.poll.records metadata.max.age.ms
metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy metric.reporters metrics.num.samples
metrics.recording.level metrics.sample.window.ms partition.assignment.strategy receive.buffer.bytes
reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms retry.backoff.max.ms retry.backoff.ms
sasl.client.callback.handler.class sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin
sasl.kerberos.service.name sasl.kerberos.ticket.renew.jitter sasl.kerberos.ticket.renew.window.factor
sasl.login.callback.handler.class sasl.login.class sasl.login.connect.timeout.ms sasl.login.read.timeout.ms
sasl.login.refresh.buffer.seconds sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor
sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms
sasl.oauthbearer.assertion.algorithm sasl.oauthbearer.assertion.claim.aud sasl.oauthbearer.assertion.claim.exp.seconds
sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.jti.include
sasl.oauthbearer.assertion.claim.nbf.seconds sasl.oauthbearer.assertion.claim.sub sasl.oauthbearer.assertion.file
sasl.oauthbearer.assertion.private.key.file sasl.oauthbearer.assertion.private.key.passphrase
sasl.oauthbearer.assertion.template.file sasl.oauthbearer.client.credentials.client.id
sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.clock.skew.seconds
sasl.oauthbearer.expected.audience sasl.oauthbearer.expected.issuer sasl.oauthbearer.header.urlencode
sasl.oauthbearer.jwks.endpoint.refresh.ms sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms
sasl.oauthbearer.jwks.endpoint.retry.backoff.ms sasl.oauthbearer.jwks.endpoint.url
sasl.oauthbearer.jwt.retriever.class sasl.oauthbearer.jwt.validator.class sasl.oauthbearer.scope
sasl.oauthbearer.scope.claim.name sasl.oauthbearer.sub.claim.name security.providers send.buffer.bytes
session.timeout.ms share.acknowledgement.mode share.acquire.mode socket.connection.setup.timeout.max.ms
socket.connection.setup.timeout.ms ssl.cipher.suites ssl.enabled.protocols ssl.engine.factory.class
ssl.keymanager.algorithm ssl.keystore.key ssl.keystore.password ssl.protocol ssl.provider
ssl.secure.random.implementation ssl.trustmanager.algorithm ssl.truststore.password
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""The other names of Kafka's consumer that a reader accepts. It has no consumer group and a client of its own."""


def upstream_of_options(options: Mapping[str, str], fallback: UpstreamConfig | None = None) -> UpstreamConfig:
    """Builds the connection settings from `options`, whose keys are in lower case.

    If the options give neither an address nor an identity, returns `fallback`. If they give only an identity, takes the
    address from `fallback`. Raises `ValueError` with a message that contains no secret."""
    kafka = {key.removeprefix("kafka."): value for key, value in options.items() if key.startswith("kafka.")}
    given = {key: value for key, value in kafka.items() if key in IDENTITY}
    if fallback is not None and not given:
        return fallback
    servers = given.get("bootstrap.servers")
    if servers is None and fallback is None:
        raise ValueError("Option 'kafka.bootstrap.servers' must be specified for configuring Kafka consumer")
    protocol = given.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise ValueError(f"kafka.security.protocol is one of {', '.join(_PROTOCOLS)}, not {protocol!r}")
    section: dict[str, Any] = {
        "bootstrap.servers": servers
        if servers is not None
        else [f"{host}:{port}" for host, port in (fallback.bootstrap_servers if fallback is not None else ())]
    }
    if protocol.endswith("SSL"):
        section["tls"] = _tls(given)
    if protocol.startswith("SASL"):
        section["sasl"] = _sasl(given)
    try:
        return UpstreamConfig.model_validate(section)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        raise ValueError(
            "; ".join(f"kafka.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in details)
        ) from None


def _tls(given: Mapping[str, str]) -> dict[str, Any]:
    for store in _STORES:
        if f"{store}.location" in given and given.get(f"{store}.type", "JKS").upper() != "PEM":
            raise ValueError(f"kafka.{store}.type must be PEM")
        if f"{store}.certificates" in given or f"{store}.certificate.chain" in given:
            raise ValueError(
                f"kafka.{store}.location, a PEM file, is required: certificates in an option are not supported"
            )
    section: dict[str, Any] = {
        "verify.host.name": given.get("ssl.endpoint.identification.algorithm", "https").strip() != ""
    }
    if "ssl.truststore.location" in given:
        section["ca"] = given["ssl.truststore.location"]
    if "ssl.keystore.location" in given:
        section["certificate"] = given["ssl.keystore.location"]
    if "ssl.key.password" in given:
        section["password"] = given["ssl.key.password"]
    return section


def _sasl(given: Mapping[str, str]) -> dict[str, Any]:
    mechanism = given.get("sasl.mechanism", "GSSAPI")
    if mechanism == "OAUTHBEARER":
        endpoint = given.get("sasl.oauthbearer.token.endpoint.url", "")
        if not endpoint.startswith("file:"):
            raise ValueError("kafka.sasl.oauthbearer.token.endpoint.url must name a file with one token: file:/...")
        return {"mechanism": mechanism, "token.file": "/" + endpoint.removeprefix("file:").lstrip("/")}
    username, password = _login(given)
    return {"mechanism": mechanism, "username": username, "password": password}


def _login(given: Mapping[str, str]) -> tuple[str | None, str | None]:
    jaas = given.get("sasl.jaas.config")
    if jaas is None:
        raise ValueError("kafka.sasl.jaas.config is missing")
    if not any(module in jaas for module in _JAAS_MODULES):
        raise ValueError(f"kafka.sasl.jaas.config: expected one of {', '.join(_JAAS_MODULES)}")
    found = {
        name: re.sub(r"\\(.)", r"\1", double) if double else single
        for name, double, single in _JAAS_OPTION.findall(jaas)
    }
    return found.get("username"), found.get("password")
