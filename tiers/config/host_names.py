"""The hosts in the settings: a host name, or an IP address."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_HOST_NAME = re.compile(rf"({_LABEL}\.)*{_LABEL}")


def is_host_name(name: str) -> bool:
    """`name` is in lower case. A name whose last label is a number is an address."""
    return _HOST_NAME.fullmatch(name) is not None and not name.rpartition(".")[2].isdecimal()


def check_host(value: str) -> str:
    """Raises `ValueError` for anything but a host name or an IP address."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        # A resolver also accepts other forms of an address, for example 0x7f.0.0.1.
        name = value.lower().removesuffix(".")
        if _HOST_NAME.fullmatch(name) is None or name.replace(".", "").isdecimal():
            wanted = "is not a host name or an IP address: write it without a scheme and without a port"
            raise ValueError(f"{value!r} {wanted}") from None
    return value


Host = Annotated[str, AfterValidator(check_host)]
