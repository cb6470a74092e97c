"""The part of `tidegate check` about the certificates of listeners: the names that clients verify, and the end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from proxy.listener_config import ListenerTlsConfig

_SOON: Final = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class ListenerCertificate:
    """The first certificate of a file. `hosts` are names in lower case, also `*.example.org`, and IP addresses."""

    file: Path
    hosts: frozenset[str]
    begins: datetime
    ends: datetime

    def is_for(self, host: str) -> bool:
        name = host.lower().rstrip(".")
        return name in self.hosts or f"*.{name.partition('.')[2]}" in self.hosts


def certificate_findings(
    tls: ListenerTlsConfig, advertised_hosts: Collection[str], now: datetime
) -> tuple[list[str], list[str]]:
    """Returns the problems and the warnings of a listener's certificate, which is known to be usable.

    A client verifies that the certificate is for the advertised host."""
    used = _read(tls.certificate)
    problems, warnings = _trouble_of_time(used, now)
    for host in sorted(advertised_hosts):
        if not used.is_for(host):
            names = ", ".join(sorted(used.hosts)) or "no host"
            problems.append(
                f"{used.file} is for {names}, and {host} is advertised: clients that verify the host name refuse it:"
                " get a certificate for this name, or change advertised.host"
            )
    return problems, warnings


def _trouble_of_time(certificate: ListenerCertificate, now: datetime) -> tuple[list[str], list[str]]:
    if now < certificate.begins:
        return [f"{certificate.file} is valid from {certificate.begins:%Y-%m-%d %H:%M} UTC on: check the clock"], []
    said = f"on {certificate.ends:%Y-%m-%d %H:%M} UTC: replace the file, which the proxy reads again by itself"
    if now >= certificate.ends:
        return [f"{certificate.file} expired {said}"], []
    return [], [f"{certificate.file} expires {said}"] if certificate.ends - now < _SOON else []


def _read(file: Path) -> ListenerCertificate:
    found = x509.load_pem_x509_certificates(file.read_bytes())[0]
    return ListenerCertificate(file, frozenset(_hosts(found)), found.not_valid_before_utc, found.not_valid_after_utc)


def _hosts(found: x509.Certificate) -> Iterator[str]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:  # then clients look at the common name
        names = None
    if names is None:
        yield from (str(each.value).lower() for each in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
        return
    yield from (name.lower() for name in names.get_values_for_type(x509.DNSName))
    yield from (str(each) for each in names.get_values_for_type(x509.IPAddress))
