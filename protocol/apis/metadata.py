"""Reads a Metadata response in slices, into columns instead of an object per partition.

The answer for a whole cluster has some 50 bytes per partition, so it may have megabytes. The reader gives way after
each slice. A partition costs 14 bytes in four arrays. Its replicas are left out.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple
from uuid import UUID

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    INT16,
    INT32,
    Buffer,
    read_array_length,
    read_int16,
    read_int32,
    read_string,
    read_uuid,
    skip_tagged_section,
)

FIRST_VERSION, LAST_VERSION = 10, 13
"""Version 10 is the first with topic ids."""
_ROWS_PER_SLICE = 2_000
_PARTITION = struct.Struct(">hiii")
_OPERATIONS_BYTES = 4
_NO_OPERATIONS = -(1 << 31)
_CLUSTER_OPERATIONS_UNTIL = 10
_ERROR_SINCE = 13


class BrokerEntry(NamedTuple):
    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """One partition. `leader_id` is -1 while it has no leader; `leader_epoch` is -1 in Metadata below v7."""

    index: int
    leader_id: int
    leader_epoch: int
    error: int = 0


class PartitionColumns(Mapping[int, PartitionMetadata]):
    """The partitions of one topic, one row each, in the order of the response."""

    __slots__ = ("_rows", "errors", "indexes", "leader_epochs", "leader_ids")

    def __init__(self) -> None:
        self.indexes = array("i")
        self.leader_ids = array("i")
        self.leader_epochs = array("i")
        self.errors = array("h")
        self._rows: dict[int, int] | None = None

    def __getitem__(self, index: int) -> PartitionMetadata:
        row = self._row(index)
        if row is None:
            raise KeyError(index)
        return PartitionMetadata(index, self.leader_ids[row], self.leader_epochs[row], self.errors[row])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indexes)

    def __len__(self) -> int:
        return len(self.indexes)

    def _row(self, index: int) -> int | None:
        # Brokers send the partitions in order, but need not.
        if 0 <= index < len(self.indexes) and self.indexes[index] == index:
            return index
        if self._rows is None:
            is_in_order = self.indexes == array("i", range(len(self.indexes)))
            self._rows = {} if is_in_order else {each: row for row, each in enumerate(self.indexes)}
        return self._rows.get(index)

    def add(self, error: int, index: int, leader_id: int, leader_epoch: int) -> None:
        self.errors.append(error)
        self.indexes.append(index)
        self.leader_ids.append(leader_id)
        self.leader_epochs.append(leader_epoch)

    def is_same(self, other: PartitionColumns) -> bool:
        """Whether both say the same, also about the order. It compares memory, unlike `==`."""
        return (
            self.leader_epochs == other.leader_epochs
            and self.leader_ids == other.leader_ids
            and self.errors == other.errors
            and self.indexes == other.indexes
        )

    def keep_newer(self, known: Mapping[int, PartitionMetadata]) -> Iterator[None]:
        """Takes over the partitions of `known` that have a later leader epoch, or that are missing here.

        Yields after each slice of the work."""
        if isinstance(known, PartitionColumns) and self.indexes == known.indexes:
            for first in range(0, len(self), _ROWS_PER_SLICE):
                ours = self.leader_epochs[first : first + _ROWS_PER_SLICE]
                theirs = known.leader_epochs[first : first + _ROWS_PER_SLICE]
                for row in compress(range(first, first + len(ours)), map(operator.lt, ours, theirs)):
                    self.leader_ids[row] = known.leader_ids[row]
                    self.leader_epochs[row] = known.leader_epochs[row]
                    self.errors[row] = known.errors[row]
                if first + _ROWS_PER_SLICE < len(self):
                    yield
            return
        for number, (index, old) in enumerate(known.items(), 1):
            found = self._row(index)
            if found is None:
                self._rows = None
                self.add(old.error, index, old.leader_id, old.leader_epoch)
            elif self.leader_epochs[found] < old.leader_epoch:
                self.leader_ids[found], self.leader_epochs[found] = old.leader_id, old.leader_epoch
                self.errors[found] = old.error
            if not number % _ROWS_PER_SLICE:
                yield

    def read_one(self, body: Buffer, pos: int) -> int:
        """Adds the partition at `pos`, and returns the position behind it."""
        self.add(*_PARTITION.unpack_from(body, pos))
        pos += _PARTITION.size
        for _ in range(3):  # replicas, in-sync replicas, offline replicas
            count = body[pos]
            if 0 < count < 0x80:
                pos += 1 + 4 * (count - 1)
            else:
                count, pos = read_array_length(body, pos, compact=True)
                pos += 4 * max(count, 0)
        return skip_tagged_section(body, pos)


class TopicEntry(NamedTuple):
    """One topic. `name` is None if the request named an id that the broker does not know.

    `topic_id` is 0 if the request named a topic that the broker does not know.

    `operations` has a bit for each of Kafka's operations that the proxy may do. None: the broker does not say, because
    the request did not ask or because the topic has an error."""

    error: int
    name: str | None
    topic_id: UUID
    is_internal: bool
    partitions: PartitionColumns
    operations: int | None


class MetadataReader:
    """Reads the body of one response. `brokers` and `controller_id` are valid once the first topic or slice came."""

    def __init__(self, body: Buffer, version: int) -> None:
        if not FIRST_VERSION <= version <= LAST_VERSION:
            raise ProtocolError(f"the proxy does not decode Metadata version {version}")
        self.brokers: list[BrokerEntry] = []
        self.cluster_id: str | None = None
        self.controller_id = -1
        self.position = 0
        """The number of bytes that were read."""
        self._body = body
        self._version = version

    def read(self, slice_bytes: int) -> Iterator[TopicEntry | None]:
        """Yields every topic as soon as it was read, and None after each slice of the response.

        A slice ends behind the partition or topic that passes `slice_bytes`. Raises `ProtocolError`."""
        try:
            yield from self._read(slice_bytes)
        except (struct.error, IndexError) as error:
            raise TruncatedError(
                f"a field after {self.position} exceeds the Metadata response of {len(self._body)} bytes", self.position
            ) from error

    def _read(self, slice_bytes: int) -> Iterator[TopicEntry | None]:
        body = self._body
        pos = self._read_cluster()
        topics, pos = read_array_length(body, pos, compact=True)
        slice_end = slice_bytes
        for _ in range(topics):
            error, pos = read_int16(body, pos)
            name, pos = read_string(body, pos, True)
            topic_id, pos = read_uuid(body, pos)
            is_internal, pos = body[pos] != 0, pos + 1
            count, pos = read_array_length(body, pos, compact=True)
            partitions = PartitionColumns()
            for _ in range(count):
                pos = partitions.read_one(body, pos)
                if pos >= slice_end:
                    self.position = self._checked(pos)
                    yield None
                    slice_end = pos + slice_bytes
            operations, pos = read_int32(body, pos)
            self.position = pos = self._checked(skip_tagged_section(body, pos))
            known = None if operations == _NO_OPERATIONS else operations
            yield TopicEntry(error, name, topic_id, is_internal, partitions, known)
            if pos >= slice_end:
                yield None
                slice_end = pos + slice_bytes
        if self._version <= _CLUSTER_OPERATIONS_UNTIL:
            pos += _OPERATIONS_BYTES
        if self._version >= _ERROR_SINCE:
            pos += INT16.size
        self.position = pos = self._checked(skip_tagged_section(body, pos))
        if pos != len(body):
            raise ProtocolError(f"{len(body) - pos} bytes follow the end of a Metadata response", pos)

    def _read_cluster(self) -> int:
        body, pos = self._body, INT32.size  # the throttle time
        count, pos = read_array_length(body, pos, compact=True)
        for _ in range(count):
            node_id, pos = read_int32(body, pos)
            host, pos = read_string(body, pos, True)
            port, pos = read_int32(body, pos)
            rack, pos = read_string(body, pos, True)
            self.brokers.append(BrokerEntry(node_id, host or "", port, rack))
            pos = skip_tagged_section(body, pos)
        self.cluster_id, pos = read_string(body, pos, True)
        self.controller_id, pos = read_int32(body, pos)
        return pos

    def _checked(self, pos: int) -> int:
        if pos > len(self._body):
            raise TruncatedError(f"a field ends at {pos}, but the response has {len(self._body)} bytes", pos)
        return pos
