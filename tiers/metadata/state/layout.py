"""The layout of the materialised state in LMDB: sub-databases, keys and values.

Keys are big-endian, so that the order of bytes is the order of offsets. Every key of a user partition begins with its
20 bytes of topic id and partition.

    partitions   partition                 -> widest span of its segments, topic name
    segments     partition, uuid           -> the folded record, see `stored_segment`
    starts       partition, start, uuid    -> end, order: every listable segment
    cover        partition, last offset    -> first offset, and the segment that answers, see `stored_segment`
    cover_sizes  partition                 -> number and bytes of the whole segments, offsets of all runs
    apart        partition, uuid           -> empty: every listable segment that is not whole
    deleted_segments partition, uuid       -> the folded record of a segment that is DELETE_SEGMENT_FINISHED and kept
    deletions    partition                 -> RemotePartitionDeleteState
    records-KEY  partition, name           -> a record of a type of Tidegate's own, whose api key is KEY, as `serde`
                                              writes it, with the brokers' time. The name is that of the record's key
    consumed     metadata partition        -> next offset to read, leader epoch of the batch before it
    reached      metadata partition        -> the same, of earlier states of the same topic that were read again since
    diverged     metadata partition        -> text for an operator: why the follower does not read the partition
    read_at      metadata partition        -> time (wall clock) of the last read to its end, or of its first read
    homes        partition                 -> metadata partition that its records were read from
    meta         name                      -> identity, record types that were read

A segment is *whole* if one run of the cover has all of its offsets. Almost all segments are, so a caller that looks for
the others, or for a sum, costs no look at each segment.

The runs of the cover do not overlap. Finished segments may overlap (two owners copied the same range, which is legal).
Each offset is answered by the segment whose copy began last, in the order of the metadata topic. By Kafka's rule
(docs/semantics.md 6.4) a later segment replaces those that it wholly covers, and otherwise the start offset decides.
Both answers are copies of the same log. The rule here needs one seek only: to the lowest last offset that is not below
the offset sought.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast, get_args
from uuid import UUID

import lmdb

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import OwnRecord, api_key_of, decode_value
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import CutUpdate, LocalLogStartUpdate, LogGapUpdate, LogStartOffsetUpdate

SCHEMA_VERSION = 19
KEPT_BY: Final = [api_key_of(kind) for kind in (LogStartOffsetUpdate, LocalLogStartUpdate, CopyPlan, LogGapUpdate)]
"""A partition is known while it has a segment or one of these records."""
OF_THE_LOG: Final = [*KEPT_BY, api_key_of(CutUpdate)]
"""What the deletion of a partition removes."""
STATE_FILE = "remote-log-metadata.mdb"
FRESHNESS_FILE = "freshness.mdb"
FINAL = b"final"
READING = b"reading"
"""Keys in the freshness file. The other keys of that file are four bytes long."""
LOCK_FILE = "writer.lock"
PARTITION_KEY_BYTES = 20

U64 = struct.Struct(">Q")
_PARTITION = struct.Struct(">16si")
END_AND_ORDER = struct.Struct(">Qq")
"""The order is the offset at which the copy began in the metadata partition; its complement, below 0, while the segment
is not readable."""
COVER_SIZE = struct.Struct(">qqq")
I64 = struct.Struct(">q")
I32 = struct.Struct(">i")
OFFSET_AND_EPOCH = struct.Struct(">qi")
_MAX_DATABASES = 32
_MAX_READERS = 1024
_IDENTITY = struct.Struct(">H16si")


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """The cluster and the topic from which a state was read. A process does not use a state of another identity."""

    cluster_id: str
    topic_id: UUID
    partition_count: int

    def encode(self) -> bytes:
        return _IDENTITY.pack(SCHEMA_VERSION, self.topic_id.bytes, self.partition_count) + self.cluster_id.encode()

    @classmethod
    def decode(cls, raw: bytes) -> StateIdentity | None:
        """Decodes an identity; None when another schema version wrote it."""
        if len(raw) < _IDENTITY.size:
            return None
        schema_version, topic_id, partition_count = _IDENTITY.unpack_from(raw)
        if schema_version != SCHEMA_VERSION:
            return None
        return cls(raw[_IDENTITY.size :].decode(), UUID(bytes=topic_id), partition_count)

    def is_topic_of(self, raw: bytes) -> bool:
        """Returns whether `raw` is an identity with the same topic. The schema versions may differ."""
        return len(raw) >= _IDENTITY.size and _IDENTITY.unpack_from(raw)[1] == self.topic_id.bytes


class Databases(NamedTuple):
    """The handles of the sub-databases of one environment."""

    partitions: lmdb._Database
    segments: lmdb._Database
    starts: lmdb._Database
    cover: lmdb._Database
    cover_sizes: lmdb._Database
    apart: lmdb._Database
    deleted_segments: lmdb._Database
    deletions: lmdb._Database
    homes: lmdb._Database
    consumed: lmdb._Database
    reached: lmdb._Database
    diverged: lmdb._Database
    read_at: lmdb._Database
    meta: lmdb._Database
    records: dict[int, lmdb._Database]
    """By api key."""
    of_partitions: list[lmdb._Database]
    """Those whose keys begin with a user partition."""

    @classmethod
    def open(cls, env: lmdb.Environment) -> Databases:
        opened = [env.open_db(name.encode()) for name in cls._fields[:-2]]
        api_keys = [api_key_of(kind) for kind in get_args(OwnRecord)]
        records = {api_key: env.open_db(b"records-%d" % api_key) for api_key in api_keys}
        of_partitions = [*opened[: cls._fields.index("consumed")], *records.values()]
        return cls._make([*opened, records, of_partitions])


def open_env(path: Path, map_size_bytes: int | None = None, *, is_synced: bool = True) -> lmdb.Environment:
    """Opens a file of the state, for reading alone without `map_size_bytes`. Raises `lmdb.Error`."""
    is_read_only = map_size_bytes is None
    return lmdb.open(
        str(path),
        subdir=False,
        readonly=is_read_only,
        create=not is_read_only,
        map_size=map_size_bytes or 1 << 20,  # a reader's grows to that of the file
        max_dbs=_MAX_DATABASES,
        max_readers=_MAX_READERS,
        sync=is_synced,
        metasync=is_synced,
        mode=0o600,
    )


def partition_key(partition: TopicIdPartition) -> bytes:
    return _PARTITION.pack(partition.topic_id.bytes, partition.partition)


def partition_of(key: bytes, topic: str) -> TopicIdPartition:
    return TopicIdPartition(UUID(bytes=key[:16]), I32.unpack_from(key, 16)[0], topic)


def entries(
    txn: lmdb.Transaction, database: lmdb._Database, prefix: bytes, begin: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys that begin with `prefix`, in order from `prefix` and `begin` on, each with its value.

    `txn` must not end before the iterator. The keys and values are bytes, since no transaction was begun with
    `buffers`."""
    cursor = txn.cursor(db=database)
    found = cast("Iterator[tuple[bytes, bytes]]", cursor.iternext()) if cursor.set_range(prefix + begin) else iter(())
    return takewhile(lambda entry: entry[0].startswith(prefix), found)


def delete_prefix(txn: lmdb.Transaction, database: lmdb._Database, prefix: bytes) -> None:
    cursor = txn.cursor(db=database)
    found = cursor.set_range(prefix)
    while found and cursor.key()[: len(prefix)] == prefix:
        found = cursor.delete()


def start_key(partition: bytes, start_offset: int, uuid: bytes) -> bytes:
    return partition + U64.pack(start_offset) + uuid


def encode_partition(widest_span: int, topic: str) -> bytes:
    return I64.pack(widest_span) + topic.encode()


def decode_partition(raw: bytes | memoryview) -> tuple[int, str]:
    return I64.unpack_from(raw)[0], str(raw[8:], "utf-8")


_R = TypeVar("_R", bound=OwnRecord)


def recorded(txn: lmdb.Transaction, db: Databases, kind: type[_R], prefix: bytes = b"") -> list[_R]:
    """Returns the records of a type of Tidegate's own whose keys begin with `prefix`, in the order of the keys."""
    found = [
        _decode(raw) if len(raw) <= _CACHED_BYTES else decode_value(raw)
        for _, raw in entries(txn, db.records[api_key_of(kind)], prefix)
    ]
    if not all(isinstance(record, kind) for record in found):
        raise RemoteLogMetadataError(f"the saved state has another record in the place of a {kind.__name__}")
    return cast("list[_R]", found)


_CACHED_BYTES = 1024
"""The largest record that is cached. A copy plan may take megabytes, and is asked for once a round."""
_decode = lru_cache(maxsize=16_384)(decode_value)
"""Cached, since the same few records are asked for again and again."""


def decode_position(raw: bytes | memoryview) -> OffsetAndEpoch:
    return OffsetAndEpoch(*OFFSET_AND_EPOCH.unpack(raw))
