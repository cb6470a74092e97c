"""Decides which records an owner may write, by the record types that the members of the group read.

A record type is an api key and the version of its message. Each member declares in its subscription which types it
reads. An owner writes a record that a reader may not ignore only when every member of the group reads its type.
Otherwise a member would continue without the record, and decide with less knowledge than the others. A process that is
no member, or that joins later, may find such a record. Then that metadata partition is not fresh in the process until
the process is upgraded (`committed_records`).

The rule applies to the records that owners write in the generation of their assignment. A record that is written
without ownership (`TopicLog`) must have a type that is read by every release that declares record types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from protocol.errors import TruncatedError
from protocol.primitives import Buffer, read_array_length
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import KeyAndValue, RecordType, decode_key, is_ignorable, read_record_type

_TYPE = struct.Struct(">ii")
_COUNT = struct.Struct(">i")


def check_writable(records: Sequence[KeyAndValue], known: frozenset[RecordType]) -> None:
    """Checks that every member of the group understands `records`, which are keys and values.

    A member that knows any version of an api key understands its tombstones. Raises `RemoteLogMetadataError` for a
    record whose type is not in `known` and that no reader may ignore."""
    api_keys = {record_type.api_key for record_type in known}
    for key, value in records:
        api_key = decode_key(key).api_key
        is_known = api_key in api_keys if value is None else read_record_type(value) in known
        if not is_known and not is_ignorable(api_key):
            raise RemoteLogMetadataError(
                f"a member of the group does not know these records of api key {api_key} yet: upgrade all proxies and"
                " jobs"
            )


def encode_record_types(record_types: Iterable[RecordType]) -> bytes:
    ordered = sorted(record_types)
    return _COUNT.pack(len(ordered)) + b"".join(_TYPE.pack(*each) for each in ordered)


def decode_record_types(buf: Buffer, pos: int) -> tuple[frozenset[RecordType], int]:
    """Reads record types at `pos`. Returns them and the position after them. Raises `ProtocolError`."""
    count, pos = read_array_length(buf, pos, compact=False)
    end = pos + max(count, 0) * _TYPE.size
    if end > len(buf):
        raise TruncatedError(f"{count} record types at byte {pos} exceed the {len(buf)} bytes")
    return frozenset(RecordType(*each) for each in _TYPE.iter_unpack(bytes(buf[pos:end]))), end
