"""`load_kernels`: the compiled kernels, from a place whose name lasts, so that numba finds what it compiled before.

numba keeps machine code beside the source, by the source's path. Code that Spark ships in a zip lies under another
path in every application, and each of its Python processes would compile for seconds. So the source is copied once to
a folder named after its content, and imported from there. That folder is this user's alone: what lies in it is run.
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

log = logging.getLogger(__name__)


@cache
def load_kernels() -> ModuleType | None:
    """None where numba cannot be used: it is optional, and does not load under a tight limit of memory."""
    try:
        return _import_kernels()
    except (ImportError, OSError) as error:
        log.warning("records are decoded without numba, which is slow", extra={"reason": str(error)})
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
    """This user's own; nobody else may write to it. Raises `OSError` where there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = home
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"others may write to {folder}")
    return folder


def import_from_stable_path(source: str, folder: Path) -> ModuleType:
    """Raises `OSError`, `ImportError`."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    name = f"tidegate_kernels_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = folder / f"kernels-{digest}" / f"{name}.py"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    if not path.exists():
        # Whole or not at all: other processes may be here too. The one that is late replaces it by the same bytes.
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
