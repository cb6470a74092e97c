"""Marks a settings file as used by a running process, by an abstract socket whose name is that of the file.

The mark ends with the process. Like the ports of the process, it belongs to the network namespace. It stays when an
editor replaces the file."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def settings_in_use(file: Path) -> Iterator[None]:
    """Marks the file, unless another process has marked it."""
    with socket.socket(socket.AF_UNIX) as mark:
        with suppress(OSError):
            mark.bind(_name(file))
        yield


def is_in_use(file: Path) -> bool:
    """Returns whether a process serves by this file now."""
    with socket.socket(socket.AF_UNIX) as mark:
        try:
            mark.bind(_name(file))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _name(file: Path) -> bytes:
    return b"\0tidegate-" + hashlib.sha256(os.fsencode(file.resolve())).hexdigest().encode()
