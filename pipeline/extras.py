"""Names the extra of Tidegate that has a missing module, and the supported versions of an installed one."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from typing import Final

EXTRAS: Final = {
    "pyspark": "pipeline",
    "py4j": "pipeline",
    "pyarrow": "pipeline",
    "numpy": "pipeline",
    "pyiceberg": "iceberg",
}


def what_to_install(error: ImportError) -> str | None:
    """Returns one line, or None if no extra has the module."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    install = f"run `pip install '.[{EXTRAS[package]}]'` in the clone of Tidegate"
    found = sys.modules.get(package)
    if found is None:
        return f"{package} is missing: {install}"
    # The package was imported, and lacks a module or a name: it is another release.
    wanted = next((one for one in requires("tidegate") or () if re.match(rf"{package}\W", one)), package)
    supported = re.sub(r"\[.*?\]", "", wanted.partition(";")[0])
    release = getattr(found, "__version__", "of an unknown version")
    return f"{package} {release} cannot be used ({error}): Tidegate needs {supported}: {install}"
