"""Who owns which metadata partition: decided by the group's leader, a pure function of the members.

Partitions stay with their owner, counts differ by at most one, and all members agree, since only member ids and what
the members say of themselves count. A member that claims partitions gets those and no others (an offload run, for as
long as it lasts); of two claims on one partition the one that was granted before stays, else the lower member id's.

The bytes are Kafka's consumer protocol, so that `kafka-consumer-groups.sh` shows owners; what is ours is in user data.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

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

PROTOCOL_TYPE = "consumer"
PROTOCOL_NAME = "tidegate"
_VERSION = 0


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member says of itself. `claims` None: an ordinary member, which takes its share."""

    owned: frozenset[int] = frozenset()
    claims: frozenset[int] | None = None


def assign(partition_count: int, members: Mapping[str, Subscription]) -> dict[str, list[int]]:
    """Every partition once, as long as there is an ordinary member or a claim on it."""
    assignment: dict[str, list[int]] = {member_id: [] for member_id in members}
    free = set(range(partition_count))
    ordinary = sorted(name for name, member in members.items() if member.claims is None)
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
    # Who owns the most keeps the most; then nothing moves that need not.
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
    )


def decode_subscription(buf: Buffer) -> Subscription:
    """Raises `RemoteLogMetadataError`."""
    try:
        _, pos = read_int16(buf, 0)
        count, pos = read_array_length(buf, pos, compact=False)
        for _ in range(count):
            _, pos = read_string(buf, pos, compact=False)
        pos, end = read_bytes_bounds(buf, pos, compact=False)
        if end < 0:
            return Subscription()
        owned, pos = _decode_numbers(buf, pos)
        claims = None if pos >= end else _decode_numbers(buf, pos)[0]
    except ProtocolError as error:
        raise RemoteLogMetadataError(f"a member's subscription cannot be read: {error}") from error
    return Subscription(owned, claims)


def encode_assignment(topic: str, partitions: list[int]) -> bytes:
    return (
        INT16.pack(_VERSION)
        + INT32.pack(1)
        + write_string(topic, compact=False)
        + _encode_numbers(partitions)
        + INT32.pack(-1)
    )


def decode_assignment(buf: Buffer, topic: str) -> frozenset[int]:
    """Raises `RemoteLogMetadataError`. Nothing at all is an empty assignment."""
    if len(buf) == 0:
        return frozenset()
    assigned: frozenset[int] = frozenset()
    try:
        _, pos = read_int16(buf, 0)
        count, pos = read_array_length(buf, pos, compact=False)
        for _ in range(count):
            name, pos = read_string(buf, pos, compact=False)
            partitions, pos = _decode_numbers(buf, pos)
            if name == topic:
                assigned |= partitions
    except ProtocolError as error:
        raise RemoteLogMetadataError(f"an assignment cannot be read: {error}") from error
    return assigned


def _encode_numbers(numbers: frozenset[int] | list[int]) -> bytes:
    return struct.pack(f">i{len(numbers)}i", len(numbers), *sorted(numbers))


def _decode_numbers(buf: Buffer, pos: int) -> tuple[frozenset[int], int]:
    count, pos = read_array_length(buf, pos, compact=False)
    numbers = set()
    for _ in range(count):
        number, pos = read_int32(buf, pos)
        numbers.add(number)
    return frozenset(numbers), pos
