"""Assigns the metadata partitions to the members of the group.

The group's leader decides, by a pure function of the members' ids and subscriptions.

* A partition stays with its owner where possible, and the counts of two ordinary members differ by at most one.
* A member that is not fit gets nothing while an ordinary member is fit. If all are unfit, all keep their share.
* A member that claims partitions (an offload run) gets those and no others. If two members claim the same partition,
  the one that already owns it keeps it; if neither does, the member with the lower id gets it.

The bytes are Kafka's consumer protocol, so that `kafka-consumer-groups.sh` shows the owners. Tidegate's fields are in
the user data, and behind that of a subscription: the record types that the member reads, whether it is fit, and digests
of the settings that all members need the same. The user data of each assignment has the record types that all read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import ProtocolError
from protocol.primitives import (
    INT16,
    INT32,
    Buffer,
    read_array_length,
    read_bytes_bounds,
    read_int16,
    read_int32,
    read_string,
    write_string,
)
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import (
    RecordType,
    decode_record_types,
    encode_record_types,
)

PROTOCOL_TYPE = "consumer"
PROTOCOL_NAME = "tidegate"
_VERSION = 0


@dataclass(frozen=True, slots=True)
class Subscription:
    """The state and the wishes of a member. `claims` is None for an ordinary member, which takes its share."""

    owned: frozenset[int] = frozenset()
    claims: frozenset[int] | None = None
    record_types: frozenset[RecordType] = frozenset()
    is_fit: bool = True
    settings: str = ""
    """`NAME=DIGEST` for each of the settings that all members need the same. Empty: they are not known."""


class Assigned(NamedTuple):
    """A member's assignment: its metadata partitions, and the record types that every member of the group reads."""

    metadata_partitions: frozenset[int]
    record_types: frozenset[RecordType]


def encode_assignments(topic: str, partition_count: int, members: Mapping[str, Subscription]) -> dict[str, bytes]:
    record_types = frozenset.intersection(*(member.record_types for member in members.values()))
    return {
        member_id: encode_assignment(topic, Assigned(frozenset(partitions), record_types))
        for member_id, partitions in assign(partition_count, members).items()
    }


def assign(partition_count: int, members: Mapping[str, Subscription]) -> dict[str, list[int]]:
    """Assigns every partition once. A partition stays free if no member claims it and there is no ordinary member."""
    assignment: dict[str, list[int]] = {member_id: [] for member_id in members}
    free = set(range(partition_count))
    ordinary = sorted(name for name, member in members.items() if member.claims is None)
    ordinary = [name for name in ordinary if members[name].is_fit] or ordinary
    claims = {name: member.claims for name, member in sorted(members.items()) if member.claims is not None}
    kept = [(name, claimed & members[name].owned) for name, claimed in claims.items()]
    for member_id, claimed in [*kept, *claims.items()]:
        granted = claimed & free
        assignment[member_id] += granted
        free -= granted
    if ordinary:
        _share(free, ordinary, members, assignment)
    return {member_id: sorted(partitions) for member_id, partitions in assignment.items()}


def _share(
    free: set[int], ordinary: list[str], members: Mapping[str, Subscription], assignment: dict[str, list[int]]
) -> None:
    least, members_with_one_more = divmod(len(free), len(ordinary))
    # The member that owns the most partitions keeps the most, so that as few partitions as possible move.
    for member_id in sorted(ordinary, key=lambda name: (-len(members[name].owned & free), name)):
        kept = sorted(members[member_id].owned & free)
        quota = least
        if members_with_one_more and len(kept) > least:
            quota += 1
            members_with_one_more -= 1
        assignment[member_id] += kept[:quota]
        free -= set(kept[:quota])
    for partition in sorted(free):
        poorest = min(ordinary, key=lambda name: (len(assignment[name]), name))
        assignment[poorest].append(partition)


def encode_subscription(topic: str, subscription: Subscription) -> bytes:
    user_data = _encode_numbers(subscription.owned)
    if subscription.claims is not None:
        user_data += _encode_numbers(subscription.claims)
    return (
        INT16.pack(_VERSION)
        + INT32.pack(1)
        + write_string(topic, compact=False)
        + INT32.pack(len(user_data))
        + user_data
        + encode_record_types(subscription.record_types)
        + INT16.pack(subscription.is_fit)
        + write_string(subscription.settings, compact=False)
    )


def decode_subscription(buf: Buffer) -> Subscription:
    """Raises `RemoteLogMetadataError`."""
    try:
        _, pos = read_int16(buf, 0)
        count, pos = read_array_length(buf, pos, compact=False)
        for _ in range(count):
            _, pos = read_string(buf, pos, compact=False)
        pos, end = read_bytes_bounds(buf, pos, compact=False)
        owned, pos = _decode_numbers(buf, pos)
        claims = None if pos >= end else _decode_numbers(buf, pos)[0]
        record_types, pos = decode_record_types(buf, end)
        is_fit, pos = read_int16(buf, pos)
        settings, _ = read_string(buf, pos, compact=False)
    except ProtocolError as error:
        raise RemoteLogMetadataError(f"a member's subscription cannot be read: {error}") from error
    return Subscription(owned, claims, record_types, is_fit != 0, settings or "")


def differing(one: str, other: str) -> str:
    """Names the settings that differ between two members that declare them; empty: none."""
    differ = set(one.split()) ^ set(other.split()) if one and other else set()
    return " and ".join(sorted({each.partition("=")[0] for each in differ}))


def encode_assignment(topic: str, assigned: Assigned) -> bytes:
    user_data = encode_record_types(assigned.record_types)
    return (
        INT16.pack(_VERSION)
        + INT32.pack(1)
        + write_string(topic, compact=False)
        + _encode_numbers(assigned.metadata_partitions)
        + INT32.pack(len(user_data))
        + user_data
    )


def decode_assignment(buf: Buffer, topic: str) -> Assigned:
    """Decodes an assignment. Raises `RemoteLogMetadataError`.

    An empty buffer is an empty assignment."""
    if len(buf) == 0:
        return Assigned(frozenset(), frozenset())
    assigned: frozenset[int] = frozenset()
    try:
        _, pos = read_int16(buf, 0)
        count, pos = read_array_length(buf, pos, compact=False)
        for _ in range(count):
            name, pos = read_string(buf, pos, compact=False)
            partitions, pos = _decode_numbers(buf, pos)
            if name == topic:
                assigned |= partitions
        pos, _ = read_bytes_bounds(buf, pos, compact=False)
        record_types, _ = decode_record_types(buf, pos)
    except ProtocolError as error:
        raise RemoteLogMetadataError(f"an assignment cannot be read: {error}") from error
    return Assigned(assigned, record_types)


def _encode_numbers(numbers: frozenset[int]) -> bytes:
    return struct.pack(f">i{len(numbers)}i", len(numbers), *sorted(numbers))


def _decode_numbers(buf: Buffer, pos: int) -> tuple[frozenset[int], int]:
    count, pos = read_array_length(buf, pos, compact=False)
    numbers = set()
    for _ in range(count):
        number, pos = read_int32(buf, pos)
        numbers.add(number)
    return frozenset(numbers), pos
