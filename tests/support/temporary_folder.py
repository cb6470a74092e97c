"""Chooses where the tests and their servers put temporary files: in memory, if the machine has enough of it.

The tests write, fsync and delete many small files. A disk takes up to eight times as long for them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

MEMORY_FOLDER = Path("/dev/shm")
NEEDED_BYTES = 10 << 30
"""The files of a whole run in their largest moment, and the memory of its servers and test processes."""


def use_memory(
    environ: MutableMapping[str, str] = os.environ, folder: Path = MEMORY_FOLDER, meminfo: Path = Path("/proc/meminfo")
) -> bool:
    """Sets TMPDIR for this process and its children, unless the user has set it. Returns whether it did."""
    if "TMPDIR" in environ or not (_is_usable(folder) and _available_bytes(meminfo) >= NEEDED_BYTES):
        return False
    environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # `gettempdir` looks at the environment again
    return True


def _is_usable(folder: Path) -> bool:
    """Tells whether a process can write and execute files there, and there is enough room."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC and shutil.disk_usage(folder).free >= NEEDED_BYTES


def _available_bytes(meminfo: Path) -> int:
    """Returns 0 on a system that does not tell."""
    if not meminfo.exists():
        return 0
    kib = next((line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")), "0")
    return int(kib) << 10
