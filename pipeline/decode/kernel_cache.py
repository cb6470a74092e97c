"""`load_kernels`: imports the compiled kernels from a stable path, so that numba finds its compiled code again.

numba keeps machine code beside the source file and looks it up by the file's path. Code that Spark ships in a zip has
another path in every application, so each Python process would compile for seconds. This module therefore copies the
source once to a folder named after the content, and imports it from there. Only the current user may write to the
folder, because its files are executed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

_KERNELS = "pipeline.decode.kernels"

logger = logging.getLogger(__name__)


@cache
def load_kernels() -> ModuleType | None:
    """Returns None if numba cannot be used. numba is optional, and it fails to load under a tight memory limit."""
    try:
        return _import_kernels()
    except (ImportError, OSError) as error:
        logger.warning("records are decoded without numba, which is slow", extra={"reason": str(error)})
        return None


def _import_kernels() -> ModuleType:
    spec = importlib.util.find_spec(_KERNELS)
    if spec is None or spec.origin is None or Path(spec.origin).is_file():
        return importlib.import_module(_KERNELS)
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(_KERNELS) if get_source is not None else None
    if source is None:
        return importlib.import_module(_KERNELS)
    return import_from_stable_path(source, cache_folder())


def cache_folder() -> Path:
    """Returns a folder that only the current user may write to. Raises `OSError` if there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = home
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"other users may write to {folder}")
    return folder


def import_from_stable_path(source: str, folder: Path) -> ModuleType:
    """Imports `source` from a file named after its digest. Raises `OSError`, `ImportError`."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    name = f"tidegate_kernels_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = folder / f"kernels-{digest}" / f"{name}.py"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    if not path.exists():
        # The file appears whole, by a rename. A slower process replaces it by the same bytes.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as part:
            part.write(source)
        Path(part.name).replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
