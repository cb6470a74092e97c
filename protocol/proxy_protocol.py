"""The header of the PROXY protocol, versions 1 and 2, with which a load balancer tells the address of its client.

The header comes before all other bytes of a connection. `bytes_to_read` tells how many more bytes to read, so that
a reader never takes bytes that belong to what follows. The format is HAProxy's `doc/proxy-protocol.txt`.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from struct import Struct

from protocol.addresses import Address
from protocol.errors import ProtocolError

FIRST_BYTES = 15
"""A header of version 1 has at least these bytes. That of version 2 has one more."""
MAX_V1_BYTES = 107
_V2_HEAD_BYTES = 16
_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_V1 = b"PROXY "
_LOCAL, _PROXY = 0x20, 0x21
_TCP4, _TCP6 = 0x11, 0x21
_V2_HEAD = Struct(">12sBBH")
_PORTS = Struct(">HH")
_MAX_PORT_DIGITS = 5


class ProxyHeaderError(ProtocolError):
    """The first bytes of a connection are no valid header."""


def bytes_to_read(head: bytes | bytearray) -> int:
    """Returns how many bytes may be read next, at least, without reading past the header. 0: the header is complete.

    `head` has at least `FIRST_BYTES` bytes. For version 1 the end shows itself: one byte at a time. Raises
    `ProxyHeaderError`."""
    if head.startswith(_V1):
        if head.endswith(b"\r\n"):
            return 0
        if len(head) >= MAX_V1_BYTES:
            raise ProxyHeaderError(f"a PROXY header of more than {MAX_V1_BYTES} bytes")
        return 1
    if not head.startswith(_SIGNATURE):
        raise ProxyHeaderError("no PROXY header")
    if len(head) < _V2_HEAD_BYTES:
        return _V2_HEAD_BYTES - len(head)
    _, command, _, size = _V2_HEAD.unpack_from(head)
    if command not in (_LOCAL, _PROXY):
        raise ProxyHeaderError(f"a PROXY header with the version and command {command:#04x}")
    return max(0, _V2_HEAD_BYTES + int(size) - len(head))


def source_of(header: bytes) -> Address | None:
    """Returns the client's address in a complete header. None: the header tells none, as those of health checks.

    Raises `ProxyHeaderError`."""
    return _source_v1(header) if header.startswith(_V1) else _source_v2(header)


def _source_v1(header: bytes) -> Address | None:
    try:
        fields = header[:-2].decode("ascii").split(" ")
        if fields[1] == "UNKNOWN":
            return None
        family, source, destination, *ports = fields[1:]
        address = {"TCP4": IPv4Address, "TCP6": IPv6Address}[family]
        address(destination)
        source_port, _ = map(_port, ports)
        return str(address(source)), source_port
    except (ValueError, KeyError, IndexError) as error:
        raise ProxyHeaderError("a malformed PROXY header") from error


def _port(digits: str) -> int:
    if not digits.isdecimal() or len(digits) > _MAX_PORT_DIGITS or int(digits) > 0xFFFF:
        raise ValueError(digits)
    return int(digits)


def _source_v2(header: bytes) -> Address | None:
    """The fields behind the addresses (TLVs) are skipped. So is a family that is not TCP over IP."""
    _, command, family, _ = _V2_HEAD.unpack_from(header)
    if command == _LOCAL or family not in (_TCP4, _TCP6):
        return None
    size = 4 if family == _TCP4 else 16
    ports_at = _V2_HEAD_BYTES + 2 * size
    if len(header) < ports_at + _PORTS.size:
        raise ProxyHeaderError("a PROXY header without room for its addresses")
    raw = header[_V2_HEAD_BYTES : _V2_HEAD_BYTES + size]
    source = IPv4Address(raw) if family == _TCP4 else IPv6Address(raw)
    return str(source), _PORTS.unpack_from(header, ports_at)[0]
