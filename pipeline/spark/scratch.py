"""`scratch_folder`: a temporary folder for the files that an executor makes before it stores them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(job: str) -> Iterator[Path]:
    """Creates a new folder and removes it after the block. On an executor the folder lies in `SPARK_LOCAL_DIRS`, which
    Spark removes even if the executor was killed."""
    folders = [one for one in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if one and Path(one).is_dir()]
    with tempfile.TemporaryDirectory(prefix=f"tidegate-{job}-", dir=folders[0] if folders else None) as folder:
        yield Path(folder)
