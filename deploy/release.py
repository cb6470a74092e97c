"""`make release`: builds a release from the git tag at HEAD into dist/VERSION, from what the tag has and nothing else.

A release has a wheel, an sdist, the Helm chart, an SBOM (CycloneDX) of the packages in requirements.txt, and checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

ROOT = Path(__file__).resolve().parent.parent
CHART = "deploy/helm/tidegate"
SUMS = "SHA256SUMS"
_PINNED = re.compile(r"^([\w.-]+)==([\w.!+-]+)(.*(?:\n {4}.*)*)", re.MULTILINE)
_NEEDED_BY = re.compile(r"^ +#(?: via)? +([\w.-]+)(?: \(pyproject\.toml.*\))?$", re.MULTILINE)


class RefusedError(Exception):
    """The state of the repository allows no release. The message is for the maintainer."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of a lock file: the hashes of its files, and the packages that need it."""

    name: str
    version: str
    sha256: tuple[str, ...]
    needed_by: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def locked(text: str) -> Iterator[Package]:
    """Yields the packages of a lock file of `make lock`."""
    for name, version, rest in _PINNED.findall(text):
        yield Package(name, version, tuple(re.findall(r"sha256:(\w+)", rest)), tuple(_NEEDED_BY.findall(rest)))


def sbom(version: str, packages: Iterable[Package], at: datetime) -> dict[str, Any]:
    """Returns the SBOM of Tidegate of this version, with `packages`, in the format CycloneDX 1.6."""
    known = sorted(packages, key=lambda each: each.name)
    own = Package("tidegate", version, (), ())
    licenses = [{"license": {"id": "Apache-2.0"}}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, f'{own.purl} {at.isoformat()}')}",
        "version": 1,
        "metadata": {
            "timestamp": at.isoformat(),
            "component": {"type": "application", **_identity(own), "licenses": licenses},
        },
        "components": [
            {
                "type": "library",
                **_identity(each),
                "hashes": [{"alg": "SHA-256", "content": content} for content in each.sha256],
            }
            for each in known
        ],
        "dependencies": [
            {"ref": each.purl, "dependsOn": [other.purl for other in known if each.name in other.needed_by]}
            for each in (own, *known)
        ],
    }


def _identity(package: Package) -> dict[str, str]:
    return {"bom-ref": package.purl, "name": package.name, "version": package.version, "purl": package.purl}


def version_at_head(root: Path) -> str:
    """Returns the version that the tag at HEAD names. Raises `RefusedError`."""
    if changes := _git(root, "status", "--porcelain"):
        raise RefusedError(f"the tree has changes that are in no commit: commit or remove them\n{changes}")
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    if not tags:
        raise RefusedError(f"HEAD has no tag: git tag v{version}")
    if f"v{version}" not in tags:
        raise RefusedError(f"the tag of HEAD is {', '.join(tags)}, but pyproject.toml has the version {version}")
    for key, found in re.findall(
        r'^(version|appVersion): "?([^"\n]+)', (root / CHART / "Chart.yaml").read_text(), re.M
    ):
        if found != version:
            raise RefusedError(
                f"{CHART}/Chart.yaml has the {key} {found}, but pyproject.toml has the version {version}"
            )
    return str(version)


def build(root: Path, helm: Path) -> Path:
    """Builds the release, and returns its folder. Raises `RefusedError`."""
    version = version_at_head(root)
    committed_at_s = int(_git(root, "log", "-1", "--format=%ct"))
    release = root / "dist" / version
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(committed_at_s)}
        for hook in ("build_sdist", "build_wheel"):
            code = f"from setuptools import build_meta; build_meta.{hook}({str(release)!r})"
            built = [sys.executable, "-W", "ignore", "-c", code]
            subprocess.run(built, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        chart = [str(helm.absolute()), "package", CHART, "--destination", str(release)]
        subprocess.run(chart, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    packages = locked((root / "requirements.txt").read_text())
    listed = sbom(version, packages, datetime.fromtimestamp(committed_at_s, UTC))
    (release / f"tidegate-{version}.cdx.json").write_text(json.dumps(listed, indent=2) + "\n")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(release.iterdir())}
    (release / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    return release


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.rstrip()


def main() -> None:
    try:
        release = build(ROOT, Path(sys.argv[1]))
    except RefusedError as refused:
        sys.exit(f"make release: {refused}")
    sys.stdout.write((release / SUMS).read_text())


if __name__ == "__main__":
    main()
