"""`ListenerConfig`: the ports to which clients connect, the addresses that the proxy tells them, and TLS."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyNetwork, PositiveInt, model_validator

from tiers.config.settings import Section
from tiers.config.upstream_config import CertificateConfig, Host, check_host


def _advertised_host(value: str) -> str:
    check_host(value.replace("{id}", "0"))
    if value.strip("[]") in ("0.0.0.0", "::"):
        raise ValueError(f"no client can connect to {value}: expected the name or an address of this machine")
    return value


def _networks(value: object) -> object:
    if not isinstance(value, list):
        raise ValueError('expected a list of networks, for example ["10.1.0.0/16"]')
    for network in value:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ValueError(f"{error}; a network is written as 10.1.0.0/16 or fd00::/8") from None
    return value


class ListenerTlsConfig(CertificateConfig):
    """TLS for the connections of clients. Without this section, these connections are plain text. Files are in PEM
    format; the proxy reads them again when they change. A client's certificate admits the client to the proxy only. The
    brokers do not see it and identify clients by SASL alone.
    """

    client_ca: Path | None = Field(
        default=None,
        description="The file with the authorities that sign the certificates of clients.",
    )
    client_auth: Literal["none", "requested", "required"] = Field(
        default="none",
        description=(
            "Whether clients must present a certificate. With `requested`, a client may present none, but the proxy "
            "rejects an invalid one."
        ),
    )

    @model_validator(mode="after")
    def _check_client_auth(self) -> ListenerTlsConfig:
        if (self.client_auth == "none") != (self.client_ca is None):
            raise ValueError("client.auth and client.ca go together: set both, or neither")
        return self


class ListenerConfig(Section):
    """The ports to which clients connect, and the addresses that the proxy tells them. By default, each broker has a
    port of its own, and one more port is for bootstrapping. With `brokers.by = "sni"`, one port serves all brokers. For
    several listeners, write `[[listener]]` once for each; `[listener.tls]` then belongs to the one above it.
    """

    host: Host = Field(default="0.0.0.0", description="The address to bind.")
    advertised_host: Annotated[str, AfterValidator(_advertised_host)] = Field(
        default="localhost",
        min_length=1,
        description=(
            "The host name or IP address that the proxy tells clients, without a port. `{id}` in it stands for the "
            "node id of the broker, as in `broker-{id}.kafka.example.org`."
        ),
    )
    bootstrap_port: PositiveInt = Field(
        default=9092,
        lt=65_536,
        description="The port for the `bootstrap.servers` setting of clients.",
    )
    brokers_by: Literal["port", "sni"] = Field(
        default="port",
        description=(
            "How clients name a broker. With `port`, each broker has a port. With `sni`, all brokers share the "
            "bootstrap port, and the host name in the TLS handshake names the broker: `advertised.host` needs `{id}`, "
            "and there must be a `[listener.tls]`. A client without a name, or with one of another form, reaches any "
            "broker, as for bootstrapping. The proxy closes the connection of a client that names an unknown broker."
        ),
    )
    base_port: PositiveInt = Field(
        default=9100,
        lt=65_536,
        description=(
            "The first port for brokers: the proxy listens for broker N at this port + N. Node ids from 65535 on need "
            '`brokers.by = "sni"`.'
        ),
    )
    advertised_base_port: PositiveInt | None = Field(
        default=None,
        lt=65_536,
        description=(
            "The first port that the proxy tells clients: broker N is at this port + N. By default `base.port`. Set it "
            "if a load balancer or a container maps the ports."
        ),
    )
    advertised_port: PositiveInt | None = Field(
        default=None,
        lt=65_536,
        description=(
            "One port that the proxy tells clients for all brokers, which needs `{id}` in `advertised.host`. With "
            "`sni`, it is the bootstrap port by default."
        ),
    )
    proxy_protocol_trusted_networks: Annotated[tuple[IPvAnyNetwork, ...], BeforeValidator(_networks)] = Field(
        default=(),
        description=(
            'The networks of load balancers, for example `["10.1.0.0/16"]`. If there are any, every connection must '
            "come from one of them, and begin with a header of the PROXY protocol (version 1 or 2). Limits and logs "
            "then see the client's own address."
        ),
    )
    tls: ListenerTlsConfig | None = None

    @property
    def names_brokers_by_sni(self) -> bool:
        return self.brokers_by == "sni"

    @property
    def name(self) -> str:
        """What messages call the listener."""
        return f"{self.host}:{self.bootstrap_port}"

    @model_validator(mode="after")
    def _check_addresses(self) -> ListenerConfig:
        has_id = "{id}" in self.advertised_host
        if self.names_brokers_by_sni and self.tls is None:
            raise ValueError('brokers.by = "sni" needs a [listener.tls]: without TLS, clients name no host')
        if self.names_brokers_by_sni and not has_id:
            raise ValueError('brokers.by = "sni" needs {id} in advertised.host, as in broker-{id}.kafka.example.org')
        if self.names_brokers_by_sni and self.advertised_base_port is not None:
            raise ValueError('advertised.base.port is for brokers.by = "port": set advertised.port')
        if self.advertised_port is not None and self.advertised_base_port is not None:
            raise ValueError("advertised.port and advertised.base.port are both set: remove one of them")
        if self.advertised_port is not None and not has_id:
            raise ValueError("with advertised.port, all brokers would have one address: put {id} into advertised.host")
        if self.advertised_host.count("{id}") > 1:
            raise ValueError("advertised.host may have {id} once")
        return self
