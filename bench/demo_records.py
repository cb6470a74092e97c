"""The demo's records. A record is a function of its partition and sequence number, so a reader needs no copy of it.

Every value starts with its partition, its sequence number and a checksum of the rest. A reader computes the record with
the next sequence number, and compares its whole value, key and timestamp with the record that it has read.
"""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass
from functools import cache

TOPIC = "orders"
PARTITIONS = 4
MEAN_VALUE_BYTES = 2048
ABORTED_PER_PARTITION = 500

_HEADER = struct.Struct(">iqI")
_POOL_BYTES = 1 << 20
_ABORTED_SEQUENCE = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """A range of every partition's sequence numbers, which one producer writes. `codec` is Kafka's name of it."""

    codec: str
    first: int
    last: int
    """The last sequence number, inclusive."""


def batches(records_per_partition: int) -> list[Batch]:
    """Returns uncompressed and compressed batches. Together they have every sequence number once."""
    codecs = ["none", "lz4", "none", "zstd", "gzip", "none"]
    size = -(-records_per_partition // len(codecs))
    starts = range(0, records_per_partition, size)
    return [
        Batch(codec, start, min(start + size, records_per_partition) - 1)
        for codec, start in zip(codecs, starts, strict=False)
    ]


def records_per_partition(total_bytes: int) -> int:
    return max(1, total_bytes // PARTITIONS // MEAN_VALUE_BYTES)


@cache
def _pool() -> bytes:
    """Returns text of random words, which codecs can compress."""
    source = random.Random(405)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["".join(source.choices(letters, k=source.randint(3, 12))) for _ in range(20_000)]
    text = " ".join(source.choices(words, k=_POOL_BYTES // 6)).encode()
    return text[:_POOL_BYTES]


def _content(partition: int, sequence: int) -> bytes:
    pool = _pool()
    mixed = (partition * 2_654_435_761 + sequence * 40_503) & 0xFFFFFFFF
    length = MEAN_VALUE_BYTES // 2 + mixed % MEAN_VALUE_BYTES - _HEADER.size
    start = mixed * 31 % (len(pool) - length)
    return pool[start : start + length]


def value(partition: int, sequence: int) -> bytes:
    content = _content(partition, sequence)
    return _HEADER.pack(partition, sequence, zlib.crc32(content)) + content


def key(partition: int, sequence: int) -> bytes:
    return b"%d-%d" % (partition, sequence)


def aborted_value(number: int) -> bytes:
    """Returns the value of an aborted record, which no read_committed consumer may ever see."""
    return _HEADER.pack(-1, _ABORTED_SEQUENCE, number) + b"aborted" * 100


class Verifier:
    """Checks that one reader gets the produced records in order, exactly once."""

    def __init__(self, records: int, first_timestamp_ms: int) -> None:
        self.records = records
        self.first_timestamp_ms = first_timestamp_ms
        self.next_sequence = dict.fromkeys(range(PARTITIONS), 0)
        self.mismatches: list[str] = []
        self.value_bytes = 0

    @property
    def read(self) -> int:
        return sum(self.next_sequence.values())

    @property
    def complete(self) -> bool:
        return all(sequence == self.records for sequence in self.next_sequence.values())

    def check(
        self, partition: int, offset: int, seen_key: bytes | None, seen_value: bytes | None, seen_timestamp_ms: int
    ) -> None:
        sequence = self.next_sequence[partition]
        if (seen_value, seen_key, seen_timestamp_ms) != (
            value(partition, sequence),
            key(partition, sequence),
            self.first_timestamp_ms + sequence,
        ):
            self.mismatches.append(f"partition {partition} offset {offset}: not record {sequence} (key {seen_key!r})")
        self.next_sequence[partition] = sequence + 1
        self.value_bytes += len(seen_value or b"")
