"""Certificates for a test: an authority, and the files that brokers, the proxy and clients read."""

from __future__ import annotations

from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

HOSTS = ("localhost", "127.0.0.1")


class Authority:
    """A certificate authority with its files in `folder`. A name that is used again gets a new key and certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def identity(self, name: str, *hosts: str) -> Path:
        """Returns a file with a new key and its chain, in a format that Kafka reads too.

        The certificate is valid for `hosts`. Default: `HOSTS`."""
        issued = self._ca.issue_cert(*(hosts or HOSTS), common_name=name)
        key = load_pem_private_key(issued.private_key_pem.bytes(), None)
        pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        file = self._folder / f"{name}.pem"
        file.write_bytes(pkcs8 + b"".join(each.bytes() for each in issued.cert_chain_pems))
        return file
