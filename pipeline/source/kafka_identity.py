"""The `kafka.*` options of a reader: the address of its Kafka and its identity there, with the names of Kafka's
clients.

Certificates are PEM files, which must exist on the executors too. Settings of Kafka's consumer that have no meaning
here (fetch sizes, deserializers' charsets, ...) are accepted and have no effect.
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
_IDENTITY = ("security.", "sasl.", "ssl.", "bootstrap.servers")


def upstream_of_options(options: Mapping[str, str], fallback: UpstreamConfig | None = None) -> UpstreamConfig:
    """Builds the connection settings from `options`, whose keys are in lower case.

    If the options give neither an address nor an identity, returns `fallback`. If they give only an identity, takes the
    address from `fallback`. Raises `ValueError` with a message that contains no secret."""
    kafka = {key.removeprefix("kafka."): value for key, value in options.items() if key.startswith("kafka.")}
    given = {key: value for key, value in kafka.items() if key.startswith(_IDENTITY)}
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
