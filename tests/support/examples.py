"""The packages of `docs/examples`, installed as pip leaves them, without an index that has a build backend."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def install_example(name: str, folder: Path) -> None:
    """Installs the example into `folder`, by its own pyproject.toml. The folder must then be on Python's path."""
    example = EXAMPLES / name
    pyproject = tomllib.loads((example / "pyproject.toml").read_text())
    project = pyproject["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    version = f"Version: {project['version']}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\n{version}")
    ((group, entries),) = project["entry-points"].items()
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    for module in pyproject["tool"]["setuptools"]["py-modules"]:
        (folder / f"{module}.py").write_text((example / f"{module}.py").read_text())
