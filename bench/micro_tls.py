"""What does TLS cost a relay in Python? `python -m bench.micro_tls [--mib 512] [--rounds 3]`.

A relay decrypts each byte and encrypts it again. The event loop gives the bytes to OpenSSL in memory (`ssl.MemoryBIO`),
and takes them from there. This measures both directions without sockets: the
cipher alone, as the least that any relay pays, and OpenSSL as the event loop uses it. All times are CPU times.
"""

from __future__ import annotations

import argparse
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.table import Table

from tests.support.proxy.tls_sides import broker_side, client_side
from tests.support.servers.certificates import Authority

MIB: Final = 1 << 20
RECORD_BYTES: Final = 16 << 10
"""The most that a TLS record holds."""
PIECE_BYTES: Final = 256 << 10
"""The most that the event loop takes from a socket, or lets OpenSSL decrypt, in one step."""


class Cost(NamedTuple):
    """CPU seconds for each GiB."""

    encrypt: float
    decrypt: float


class Ends:
    """The two ends of a TLS connection in memory."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.wire = to_server
        self.client = client_side(authority).wrap_bio(to_client, to_server, server_hostname="localhost")
        self.server = broker_side(authority).wrap_bio(to_server, to_client, server_side=True)
        for side in (self.client, self.server, self.client, self.server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def of_the_cipher(pieces: int) -> Cost:
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    record = bytes(RECORD_BYTES)
    sealed = cipher.encrypt(nonce, record, None)
    records = pieces * (PIECE_BYTES // RECORD_BYTES)
    return Cost(
        _cpu_s(lambda: [cipher.encrypt(nonce, record, None) and None for _ in range(records)]),
        _cpu_s(lambda: [cipher.decrypt(nonce, sealed, None) and None for _ in range(records)]),
    )


def of_the_loop(pieces: int) -> Cost:
    """Encrypts a piece, takes it from the buffer, and lets the other end decrypt it, again and again."""
    encrypting = decrypting = 0.0
    piece = bytes(PIECE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        ends = Ends(Path(folder))
        for _ in range(pieces):
            began = time.process_time()
            ends.client.write(piece)
            sent = ends.wire.read()
            written = time.process_time()
            ends.wire.write(sent)
            left = PIECE_BYTES
            while left:
                left -= len(ends.server.read(PIECE_BYTES))
            encrypting += written - began
            decrypting += time.process_time() - written
    return Cost(encrypting, decrypting)


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


WAYS: Final = {"the cipher alone": of_the_cipher, "OpenSSL with buffers in memory": of_the_loop}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=512, help="what each way encrypts in a round")
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    pieces = given.mib * MIB // PIECE_BYTES
    table = Table(title=f"{given.mib} MiB, medians of {given.rounds}: CPU s/GiB")
    for heading in ("", "encrypt", "decrypt", "both"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, way in WAYS.items():
        rounds = [way(pieces) for _ in range(given.rounds)]
        encrypt, decrypt = (statistics.median(cost) * 1024 / given.mib for cost in zip(*rounds, strict=True))
        table.add_row(name, f"{encrypt:.2f}", f"{decrypt:.2f}", f"{encrypt + decrypt:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
