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

from collections.abc import Iterable, Sequence

from protocol.primitives import Buffer
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.codecs import NUMBER, array, fields
from tiers.metadata.records.serde import KeyAndValue, RecordType, decode_key, is_ignorable, read_record_type

_TYPES = array(fields(RecordType, api_key=NUMBER, version=NUMBER), compact=False)


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
    return _TYPES.write(sorted(record_types))


def decode_record_types(buf: Buffer, pos: int) -> tuple[frozenset[RecordType], int]:
    """Reads record types at `pos`. Returns them and the position after them. Raises `ProtocolError`."""
    record_types, pos = _TYPES.read(buf, pos)
    return frozenset(record_types), pos
