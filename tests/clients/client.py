"""What every client of the matrix can do, said once: the tests know no client by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

TIMEOUT_S = 300.0
FETCH_BYTES = 1 << 20
"""Of one partition in one fetch, where the test does not mind."""
READ_COMMITTED = "read_committed"
READ_UNCOMMITTED = "read_uncommitted"
CLASSIC = "classic"
CONSUMER = "consumer"
"""Group protocols: the old one, and that of KIP-848."""


class ClientRecord(NamedTuple):
    """All that a client tells of a record."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Offsets(NamedTuple):
    """`at_timestamp` is None when no record is that late."""

    earliest: int
    latest: int
    at_timestamp: int | None


class OffsetOutOfRange(Exception):
    """The client was told OFFSET_OUT_OF_RANGE, and told to reset nothing."""


class Positioned(Protocol):
    """A client that tells where it stands."""

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        """All records from `offset` on, outside of any group; returns when the client says that it stands at `end`."""


class Reader(Protocol):
    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        """`count` records from `offset` on, outside of any group, so many bytes a fetch. Raises `OffsetOutOfRange`."""


class Client(Reader, Protocol):
    """Every call is a client of its own, on partition 0; each ends within `TIMEOUT_S`, or raises."""

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        """Idempotent, acks=all, in batches of a few kB; returns when all are acknowledged."""

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None: ...

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        """The next `count` records of the group, from the earliest if it is new; then commits just behind them."""

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets: ...


def parse_records(output: bytes) -> list[ClientRecord]:
    """From the lines that `franz` and `MatrixClient` print: offset, timestamp, key, value, headers; bytes in hex."""
    return [_record(line.split()) for line in output.decode().splitlines()]


def _record(fields: Sequence[str]) -> ClientRecord:
    offset, timestamp, key, value, *headers = fields
    pairs = (header.partition("=") for header in headers)
    return ClientRecord(
        int(offset), int(timestamp), _bytes(key), _bytes(value), tuple((name, _bytes(text)) for name, _, text in pairs)
    )


def _bytes(text: str) -> bytes | None:
    return None if text == "null" else bytes.fromhex(text.removeprefix("x"))


def parse_offsets(output: bytes) -> Offsets:
    """From a line `earliest latest at_timestamp`; -1 for none."""
    earliest, latest, at_timestamp = map(int, output.split())
    return Offsets(earliest, latest, None if at_timestamp < 0 else at_timestamp)


def header_pairs(headers: Iterable[tuple[str, bytes | None]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((name, value) for name, value in headers or ())
