"""Finds the broker addresses in responses and replaces them (docs/semantics.md 8).

Node ids, racks and all other fields stay verbatim. An entry with a negative node id reports an error and names no
broker, so it stays unchanged. The controllers that DescribeCluster lists on request (endpoint type 2) stay unchanged
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from protocol.api_keys import ApiKey, VersionRange
from protocol.header import response_body_position
from protocol.primitives import INT32, Buffer, read_int8, read_int32, read_string, write_string, write_uvarint
from protocol.schema import Selector, compile_message
from protocol.splice import Splice, splice
from protocol.steps import Stepped, Steps

Address = tuple[str, int]
"""Host and port."""

AddressOf = Callable[[int], Address | None]
"""Returns the address to advertise for a node id; None keeps the address that the broker sent."""

_LATEST = 32767
_BROKER_ENDPOINTS = 1


class AddressFields(NamedTuple):
    """The structs with an address in a range of versions: their path, and the field with the node id.

    The fields Host and Port follow the node id."""

    versions: VersionRange
    path: tuple[str, ...]
    node_id: str


ADDRESS_FIELDS: Mapping[int, tuple[AddressFields, ...]] = {
    ApiKey.PRODUCE: (AddressFields(VersionRange(10, _LATEST), ("NodeEndpoints",), "NodeId"),),
    ApiKey.FETCH: (AddressFields(VersionRange(16, _LATEST), ("NodeEndpoints",), "NodeId"),),
    ApiKey.METADATA: (AddressFields(VersionRange(0, _LATEST), ("Brokers",), "NodeId"),),
    ApiKey.FIND_COORDINATOR: (
        AddressFields(VersionRange(0, 3), (), "NodeId"),
        AddressFields(VersionRange(4, _LATEST), ("Coordinators",), "NodeId"),
    ),
    ApiKey.DESCRIBE_CLUSTER: (AddressFields(VersionRange(0, _LATEST), ("Brokers",), "BrokerId"),),
    ApiKey.SHARE_FETCH: (AddressFields(VersionRange(1, _LATEST), ("NodeEndpoints",), "NodeId"),),
    ApiKey.SHARE_ACKNOWLEDGE: (AddressFields(VersionRange(1, _LATEST), ("NodeEndpoints",), "NodeId"),),
}


def carries_addresses(api_key: int, api_version: int) -> bool:
    return any(api_version in fields.versions for fields in ADDRESS_FIELDS.get(api_key, ()))


@Stepped
def rewrite_addresses(api_key: int, api_version: int, payload: Buffer, address_of: AddressOf) -> Steps[Buffer]:
    """Returns the response payload, header included, with its addresses replaced.

    Returns `payload` itself when nothing changes. Raises `ProtocolError` for a malformed payload and for a version that
    has no schema.
    """
    splices = yield from address_splices.steps(api_key, api_version, payload, address_of)
    return (yield from splice.steps(payload, splices)) if splices else payload


@Stepped
def address_splices(api_key: int, api_version: int, payload: Buffer, address_of: AddressOf) -> Steps[list[Splice]]:
    """Returns the splices that `rewrite_addresses` applies, in ascending order.

    A caller that also patches other fields merges its own splices with them.
    """
    if not carries_addresses(api_key, api_version):
        return []
    selector, compact = _address_selector(api_key, api_version)
    body = response_body_position(api_key, api_version, payload)
    structs, tag_sizes = yield from selector.steps(payload, body)
    splices: list[Splice] = []
    growth = 0
    for node_id_at, host_at, port_at in structs:
        yield
        node_id = read_int32(payload, node_id_at.start)[0]
        address = address_of(node_id) if node_id >= 0 else None
        if address is None:
            continue
        host, port = address
        current_host = read_string(payload, host_at.start, compact)[0]
        if host != current_host:
            replacement = write_string(host, compact)
            growth += len(replacement) - (host_at.end - host_at.start)
            splices.append(Splice(host_at.start, host_at.end, replacement))
        if port != read_int32(payload, port_at.start)[0]:
            splices.append(Splice(port_at.start, port_at.end, INT32.pack(port)))
    if not splices or not (yield from _lists_brokers(api_key, api_version, payload, body)):
        return []
    if growth:
        # If any tagged field is on the path, all endpoints lie in that one, so its size grows by their total growth.
        splices[:0] = [Splice(tag.start, tag.end, write_uvarint(tag.value_end - tag.end + growth)) for tag in tag_sizes]
    return splices


def _lists_brokers(api_key: int, api_version: int, payload: Buffer, body: int) -> Steps[bool]:
    if api_key != ApiKey.DESCRIBE_CLUSTER or api_version < 1:
        return True
    plan = compile_message(api_key, api_version, "Response")
    ((endpoint_type,),) = (yield from plan.selector((), ("EndpointType",)).steps(payload, body)).structs
    return read_int8(payload, endpoint_type.start)[0] == _BROKER_ENDPOINTS


@cache
def _address_selector(api_key: int, api_version: int) -> tuple[Selector, bool]:
    (fields,) = (fields for fields in ADDRESS_FIELDS[api_key] if api_version in fields.versions)
    plan = compile_message(api_key, api_version, "Response")
    return plan.selector(fields.path, (fields.node_id, "Host", "Port")), plan.is_flexible
