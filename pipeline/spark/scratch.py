"""`scratch_folder`: a temporary folder for the files that an executor makes before it stores them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCAL_DIRS: Final = "SPARK_LOCAL_DIRS"
"""The variable that names folders for temporary files: Spark sets it on executors, `ProcessRunner` in its processes."""


@contextmanager
def scratch_folder(job: str) -> Iterator[Path]:
    """Creates a new folder and removes it after the block. If it lies in `LOCAL_DIRS`, it is removed even if the
    process was killed."""
    folders = [one for one in os.environ.get(LOCAL_DIRS, "").split(",") if one and Path(one).is_dir()]
    with tempfile.TemporaryDirectory(prefix=f"tidegate-{job}-", dir=folders[0] if folders else None) as folder:
        yield Path(folder)
