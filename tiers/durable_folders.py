"""Makes the names in a folder durable. A power cut may lose the name of a file whose bytes are on the disk."""

from __future__ import annotations

import errno
import os
from itertools import takewhile
from pathlib import Path


def create_folder(folder: Path, root: Path | None = None) -> None:
    """Creates the folder and the parents that are missing, durably. Raises `FileNotFoundError` if `root` is missing."""
    missing = list(takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    if root in missing:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root))
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Returns when the names that were created, replaced or removed in the folder are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
