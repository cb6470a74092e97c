"""The interface of the clients in the matrix. The tests depend on this interface, not on a particular client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

TIMEOUT_S = 300.0
FETCH_BYTES = 1 << 20
"""The default limit of one partition in one fetch."""
READ_COMMITTED = "read_committed"
READ_UNCOMMITTED = "read_uncommitted"
CLASSIC = "classic"
CONSUMER = "consumer"
"""The group protocols: the classic one, and that of KIP-848."""


class ClientRecord(NamedTuple):
    """A record with all fields that a client tells."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Offsets(NamedTuple):
    """Offsets of a partition. `at_timestamp` is None when no record has that timestamp or a later one."""

    earliest: int
    latest: int
    at_timestamp: int | None


class OffsetOutOfRange(Exception):
    """The client got OFFSET_OUT_OF_RANGE, and its settings allow no reset."""


class Positioned(Protocol):
    """A client that tells its position."""

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        """Reads all records from `offset` on, outside of any group. Returns when the client's position is `end`."""


class Reader(Protocol):
    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        """Reads `count` records from `offset` on, outside of any group. `max_bytes` is the limit of one fetch.

        Raises `OffsetOutOfRange`."""


class Client(Reader, Protocol):
    """A client of partition 0. Every call creates a new client. A call ends within `TIMEOUT_S`, or raises."""

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        """Produces with idempotence and acks=all, in batches of a few kB. Returns when all records are acknowledged."""

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None: ...

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        """Reads the next `count` records of the group, and commits the offset behind them.

        A new group begins at the earliest offset."""

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets: ...


def parse_records(output: bytes) -> list[ClientRecord]:
    """Parses the lines of `franz` and `MatrixClient`: offset, timestamp, key, value, headers. Bytes are in hex."""
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
    """Parses a line `earliest latest at_timestamp`, in which -1 means none."""
    earliest, latest, at_timestamp = map(int, output.split())
    return Offsets(earliest, latest, None if at_timestamp < 0 else at_timestamp)


def header_pairs(headers: Iterable[tuple[str, bytes | None]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((name, value) for name, value in headers or ())
