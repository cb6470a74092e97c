"""`tidegate-pipeline package FOLDER`: writes what `spark-submit` needs if executors do not have Tidegate installed.

`tidegate.zip` is for `--py-files`: it holds our packages and their metadata, through which the stores are found.
`tidegate_pipeline.py` is the program. Neither contains libraries: the executors' Python must have them.
"""

from __future__ import annotations

import importlib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated

import typer

PACKAGES = ("pipeline", "protocol", "tidegate", "tiers")
METADATA = ("METADATA", "entry_points.txt")
PROGRAM = "from tidegate.__main__ import tidegate_pipeline\n\nif __name__ == '__main__':\n    tidegate_pipeline()\n"


def package(folder: Annotated[Path, typer.Argument(help="Created if it is missing.")]) -> None:
    """Writes tidegate.zip and tidegate_pipeline.py for spark-submit."""
    folder.mkdir(parents=True, exist_ok=True)
    program, archive = folder / "tidegate_pipeline.py", folder / "tidegate.zip"
    program.write_text(PROGRAM)
    write_archive(archive)
    typer.echo(f"spark-submit --py-files {archive} {program} COMMAND ...")


def write_archive(file: Path) -> None:
    installed = distribution("tidegate")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in PACKAGES:
            (root,) = importlib.import_module(name).__path__
            for path in sorted(Path(root).rglob("*")):
                if path.suffix in (".py", ".json"):
                    archive.write(path, path.relative_to(Path(root).parent))
        for name in METADATA:
            text = installed.read_text(name) or installed.read_text("PKG-INFO")
            archive.writestr(f"tidegate-{installed.version}.dist-info/{name}", text or "")
