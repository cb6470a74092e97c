"""`scratch_folder`: where an executor keeps what it makes, until that is stored."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(job: str) -> Iterator[Path]:
    """A new one, which goes with the block. On an executor it is in a folder that Spark removes when the executor is
    gone, however it ended."""
    folders = [one for one in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if one and Path(one).is_dir()]
    with tempfile.TemporaryDirectory(prefix=f"tidegate-{job}-", dir=folders[0] if folders else None) as folder:
        yield Path(folder)
