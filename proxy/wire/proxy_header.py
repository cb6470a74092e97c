"""Reads the header of the PROXY protocol from a socket, before TLS and Kafka's protocol begin on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

from protocol.addresses import Address
from protocol.proxy_protocol import FIRST_BYTES, bytes_to_read, source_of


async def read_proxy_header(peer: socket.socket) -> Address | None:
    """Returns the address of the load balancer's client. None: the header tells none.

    Reads no byte behind the header. The caller has a deadline. A header has 64 KiB at most. Raises `ProxyHeaderError`,
    and `OSError` if the peer closes the connection."""
    header = bytearray()
    missing = FIRST_BYTES
    while missing:
        data = await asyncio.get_running_loop().sock_recv(peer, missing)
        if not data:
            raise ConnectionResetError("the peer closed the connection within the PROXY header")
        header += data
        missing = FIRST_BYTES - len(header) if len(header) < FIRST_BYTES else bytes_to_read(header)
    return source_of(bytes(header))


def is_trusted(address: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Returns whether the address is in one of the networks."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in networks)
