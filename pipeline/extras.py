"""Names the extra of Tidegate that has a missing module."""

from __future__ import annotations

from typing import Final

EXTRAS: Final = {
    "pyspark": "pipeline",
    "py4j": "pipeline",
    "pyarrow": "pipeline",
    "numpy": "pipeline",
    "pyiceberg": "iceberg",
}


def what_to_install(missing: ModuleNotFoundError) -> str | None:
    """Returns one line, or None if no extra has the module."""
    package = (missing.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"{package} is missing: run `pip install '.[{EXTRAS[package]}]'` in the clone of Tidegate"
