"""`TidegateConfig`: the one TOML file, read and validated. What is wrong with it is said in one line per mistake."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from proxy.context import Address
from proxy.limits_config import LimitsConfig
from tiers.broker.sasl import Mechanism, SaslCredentials
from tiers.config import (
    DurationMs,
    EncryptionConfig,
    RemoteLogConfig,
    Section,
    StorageConfig,
    StorageLocationConfig,
    TopicConfig,
)


class ConfigError(Exception):
    """What to say to the user, a line per mistake."""


def _address(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, _, port = value.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"expected host:port, not {value!r}")
    return host.strip("[]"), int(port)


def _addresses(value: object) -> object:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


HostAndPort = Annotated[Address, BeforeValidator(_address)]


_HOST_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def _host_names(value: object) -> object:
    names = [name.lower().rstrip(".") for name in value if isinstance(name, str)] if isinstance(value, list) else []
    for name in names:
        if not _HOST_NAME.fullmatch(name) or name.rpartition(".")[2].isdecimal():
            raise ValueError(f"{name!r} is no host name; `*` may stand for the first label alone")
    return names or value


class CertificateConfig(Section):
    certificate: Path = Field(description="The certificate and its chain.")
    key: Path | None = Field(None, description="The private key; by default it lies in the certificate's file.")
    key_password: SecretStr | None = Field(None, alias="key.password", description="Of an encrypted key.")


class ListenerCertificateConfig(CertificateConfig):
    """One more certificate for the same ports: for clients that name one of these hosts in the TLS handshake (SNI). Who
    names none, or another one, is shown the certificate of `[listener.tls]`.
    """

    names: Annotated[tuple[str, ...], BeforeValidator(_host_names)] = Field(
        min_length=1, description="Host names; `*.example.org` is every name of one more label. The exact one wins."
    )


class ListenerTlsConfig(CertificateConfig):
    """TLS of the client's side; without this section it is plain text. Files are in PEM form, and are read again when
    they change. A client's certificate lets it in and says nothing to the brokers: they know clients by SASL alone.
    """

    subsections = frozenset({"certificates"})

    client_ca: Path | None = Field(None, alias="client.ca", description="Who signs the certificates of clients.")
    client_auth: Literal["none", "requested", "required"] = Field(
        "none",
        alias="client.auth",
        description="Whether clients show a certificate; `requested`: only one that is wrong is turned away.",
    )
    certificates: tuple[ListenerCertificateConfig, ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> ListenerTlsConfig:
        names = [name for each in self.certificates for name in each.names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice} has two certificates")
        return self

    @model_validator(mode="after")
    def _check_client_auth(self) -> ListenerTlsConfig:
        if (self.client_auth == "none") != (self.client_ca is None):
            raise ValueError("client.auth and client.ca go together: who must show a certificate, and signed by whom")
        return self


class UpstreamTlsConfig(Section):
    """TLS to the brokers, for clients' connections and the proxy's own; without this section it is plain text. Files
    are in PEM form, and are read again when they change. Where brokers ask for no SASL, every client has the rights of
    the proxy's own certificate.
    """

    ca: Path | None = Field(None, description="Who signs the brokers' certificates; by default whom the system trusts.")
    verify_host_name: bool = Field(
        True, alias="verify.host.name", description="Whether a broker's certificate must name the broker's address."
    )
    certificate: Path | None = Field(None, description="The proxy's own certificate, for brokers that ask for one.")
    key: Path | None = Field(None, description="Its private key; by default it lies in the certificate's file.")
    key_password: SecretStr | None = Field(None, alias="key.password", description="Of an encrypted key.")

    @model_validator(mode="after")
    def _check_key(self) -> UpstreamTlsConfig:
        if self.key is not None and self.certificate is None:
            raise ValueError("there is a key without a certificate")
        return self


class UpstreamSaslConfig(Section):
    """Who the proxy itself is to the brokers, when it copies, trims and keeps metadata. Clients bring their own
    credentials, which pass through.
    """

    mechanism: Mechanism = Field(description="`PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512` or `OAUTHBEARER`.")
    username: str | None = Field(None, min_length=1, description="For all mechanisms but `OAUTHBEARER`.")
    password: SecretStr | None = Field(None, description="For all mechanisms but `OAUTHBEARER`.")
    token_file: Path | None = Field(
        None, alias="token.file", description="For `OAUTHBEARER`: a file of one token, read for every authentication."
    )

    @model_validator(mode="after")
    def _check_credentials(self) -> UpstreamSaslConfig:
        if self.mechanism == "OAUTHBEARER":
            if self.token_file is None or self.username is not None or self.password is not None:
                raise ValueError("OAUTHBEARER takes token.file, and neither username nor password")
        elif self.token_file is not None or self.username is None or self.password is None:
            raise ValueError(f"{self.mechanism} takes username and password, and no token.file")
        return self

    def credentials(self) -> SaslCredentials:
        """For the broker client alone: the password in the clear."""
        password = "" if self.password is None else self.password.get_secret_value()
        return SaslCredentials(self.mechanism, self.username or "", password, self.token_file)


class UpstreamConfig(Section):
    """The cluster behind the proxy."""

    subsections = frozenset({"tls", "sasl"})

    bootstrap_servers: Annotated[tuple[HostAndPort, ...], BeforeValidator(_addresses)] = Field(
        alias="bootstrap.servers", min_length=1, description="Brokers to start from, as Kafka's clients name them."
    )
    metadata_max_age_ms: DurationMs = Field(
        5_000, alias="metadata.max.age.ms", gt=0, description="How often the cluster's brokers and topics are read."
    )
    request_timeout_ms: DurationMs = Field(
        30_000, alias="request.timeout.ms", gt=0, description="The deadline of the proxy's own requests to brokers."
    )
    tls: UpstreamTlsConfig | None = None
    sasl: UpstreamSaslConfig | None = None


class ListenerConfig(Section):
    """What clients connect to: one port to bootstrap from, and one per broker at base port + node id."""

    subsections = frozenset({"tls"})

    host: str = Field("0.0.0.0", min_length=1, description="The address to bind.")
    advertised_host: str = Field(
        "localhost", alias="advertised.host", min_length=1, description="The host name that clients are told."
    )
    bootstrap_port: int = Field(
        9092, alias="bootstrap.port", gt=0, lt=65_536, description="The port that clients are configured with."
    )
    base_port: int = Field(
        9100, alias="base.port", gt=0, lt=65_536, description="Broker N is reached at this port + N."
    )
    reuse_port: bool = Field(
        False,
        alias="reuse.port",
        description="Bind with SO_REUSEPORT, so that several processes share the ports; workers always do.",
    )
    tls: ListenerTlsConfig | None = None


class AdminConfig(Section):
    """`/metrics`, `/livez` and `/readyz`. With workers they speak for all processes: ready is when each of them is, and
    every series has the label `process`.
    """

    host: str = Field("127.0.0.1", min_length=1, description="The address to bind.")
    port: int = Field(9190, ge=0, lt=65_536, description="0 turns the admin port off.")


class StateConfig(Section):
    """What a proxy keeps on disk. It can be deleted while the proxy is stopped: all of it is rebuilt."""

    path: Path = Field(Path("tidegate-state"), description="A folder of this proxy alone; created when missing.")


class LogConfig(Section):
    """What the process says of itself, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least important to write.")
    format: Literal["text", "json"] = Field("text", description="For people, or one JSON object per line.")


SECTIONS = ("upstream", "listener", "admin", "state", "storage", "encryption", "topics", "log", "limits")


class TidegateConfig(BaseModel):
    """The whole file. Kafka's `remote.*` keys stand at its top, before the first section."""

    model_config = {"frozen": True, "extra": "forbid", "hide_input_in_errors": True}

    upstream: UpstreamConfig
    listener: ListenerConfig = Field(default_factory=ListenerConfig.defaults)
    admin: AdminConfig = Field(default_factory=AdminConfig.defaults)
    state: StateConfig = Field(default_factory=StateConfig.defaults)
    storage: StorageConfig | None = None
    encryption: EncryptionConfig = EncryptionConfig()
    topics: tuple[TopicConfig, ...] = ()
    log: LogConfig = Field(default_factory=LogConfig.defaults)
    limits: LimitsConfig = Field(default_factory=LimitsConfig.defaults)
    remote_log: RemoteLogConfig = Field(default_factory=RemoteLogConfig.defaults)
    workers: int = Field(
        0,
        ge=0,
        le=1024,
        description=(
            "Proxy processes that share the ports, beside one that copies and keeps the metadata; budgets and "
            "`max.connections*` are divided evenly among them. 0: one process does everything."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_remote_log(cls, values: Any) -> Any:
        known = {key: value for key, value in values.items() if key in SECTIONS or key == "workers"}
        rest = {key: value for key, value in values.items() if key not in known}
        return {**known, "remote_log": rest}

    @model_validator(mode="after")
    def _check_together(self) -> TidegateConfig:
        if self.topics and self.storage is None and self.remote_log.enabled:
            raise ValueError("[[topics]] names topics to tier, but there is no [storage] to copy them to")
        return self

    @property
    def is_tiered(self) -> bool:
        """Whether this process reads and serves a remote tier at all."""
        return self.storage is not None and self.remote_log.enabled


def load_config(path: Path) -> TidegateConfig:
    """Raises `ConfigError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return parse_config(text, str(path))


def parse_config(text: str, name: str = "configuration") -> TidegateConfig:
    """Raises `ConfigError`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    try:
        return TidegateConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{name}: {line}" for line in _explain(error))) from None


def _explain(error: ValidationError) -> Iterator[str]:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    for detail in details:
        if detail["type"] == "too_short" and any(_is_within(other["loc"], detail["loc"]) for other in details):
            continue  # what is missing was given and invalid: that is reported itself
        where = [str(part) for part in detail["loc"] if part != "remote_log"]
        section, key = _place(where)
        match detail["type"]:
            case "extra_forbidden":
                yield f"unknown key {_quoted(section, key)}{_hint(section, key)}"
            case "missing":
                yield f"missing key {_quoted(section, key)}" if key else f"missing section [{section}]"
            case _:
                message = detail["msg"].removeprefix("Value error, ")
                yield f"{_quoted(section, key)}: {message}" if where else message


def _is_within(inner: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _place(where: list[str]) -> tuple[str, str]:
    if where and where[0] in SECTIONS:
        section, *rest = [part for part in where if not part.isdecimal()]
        while rest and f"{section}.{rest[0]}" in section_models():
            section = f"{section}.{rest.pop(0)}"
        return section, ".".join(rest)
    return "", ".".join(where)


def _quoted(section: str, key: str) -> str:
    return f"[{section}] {key}".strip() if section else f"{key}"


def _hint(section: str, key: str) -> str:
    """A key may also be right, but in another section."""
    if nearest := difflib.get_close_matches(key, keys_of(section), 1, 0.6):
        return f"; did you mean {nearest[0]}?"
    for other in ("", *SECTIONS):
        if key in keys_of(other) or any(key.removeprefix(f"{other}.") == known for known in keys_of(other) if other):
            return f"; it belongs {f'in [{other}]' if other else 'at the top of the file'}"
    if not section and (nearest := difflib.get_close_matches(key.partition(".")[0], SECTIONS, 1, 0.6)):
        return f"; did you mean [{nearest[0]}]?"
    return ""


def section_models() -> Mapping[str, type[BaseModel]]:
    """By section; "" is the top of the file."""
    return {
        "": RemoteLogConfig,
        "upstream": UpstreamConfig,
        "upstream.tls": UpstreamTlsConfig,
        "upstream.sasl": UpstreamSaslConfig,
        "listener": ListenerConfig,
        "listener.tls": ListenerTlsConfig,
        "listener.tls.certificates": ListenerCertificateConfig,
        "admin": AdminConfig,
        "state": StateConfig,
        "storage": StorageConfig,
        "storage.locations": StorageLocationConfig,
        "encryption": EncryptionConfig,
        "topics": TopicConfig,
        "log": LogConfig,
        "limits": LimitsConfig,
    }


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Without sections of their own."""
    inner = getattr(model, "subsections", ())
    return {name: field for name, field in model.model_fields.items() if name not in inner}


def keys_of(section: str) -> list[str]:
    model = section_models()[section]
    names = [field.alias or field.serialization_alias or name for name, field in own_fields(model).items()]
    return [*names, "workers"] if not section else names
