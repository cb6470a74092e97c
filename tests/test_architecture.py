"""Checks of the repository: sizes, names, imports, pinned packages, and no path of one machine."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import ROOT, tracked

MAX_LINES = 520
"""About 500: a few lines more are no reason to split an idea."""
LOCKS = ["requirements.txt", "requirements-demo.txt", "requirements-dev.txt", "requirements-docs.txt"]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]

MAX_TEST_NAME = 70
"""A test's name is a short statement. A docstring has room for the rest."""

# A path in backticks that starts with a folder of ours, or a file name at the root.
NAMED_PATH = re.compile(
    r"`((?:protocol|tiers|proxy|pipeline|tidegate|tests|bench|docs|\.ci)/[\w./-]*|[\w-]+\.(?:md|toml|yml|txt))`"
)

IMPORT = re.compile(r"^\s*(?:from|import) [^()\n]*(?:\([^)]*\))?", re.MULTILINE)


def test_no_file_holds_more_than_one_idea_can_need() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert lines
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MAX_LINES} == {}


def test_no_module_imports_a_test_module() -> None:
    """A module of `tests/support` or a `conftest.py` has what tests share."""
    paths = {path: path.read_text() for path in tracked("tests/*.py", "bench/*.py")}
    assert paths
    importers = {path: each for path, text in paths.items() for each in IMPORT.findall(text) if "test_" in each}
    assert importers == {}


def test_the_names_of_tests_are_short() -> None:
    names = {name for path in tracked("tests/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert names
    assert {name for name in names if len(name) > MAX_TEST_NAME} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_what_exists(document: str) -> None:
    named = set(NAMED_PATH.findall((ROOT / document).read_text()))
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_pin_every_package_by_hash_and_name_no_index(lock: str) -> None:
    text = (ROOT / lock).read_text()
    requirements = re.findall(r"^[a-z0-9][^ ]*.*(?:\n    --hash.*)*", text, re.MULTILINE)
    assert requirements
    assert [each for each in requirements if "==" not in each or "--hash=sha256:" not in each] == []
    assert re.findall(r"://|--(?:index|extra-index|find-links|trusted)", text) == []


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("requirements.txt", []), ("requirements-demo.txt", ["demo"]), ("requirements-dev.txt", ["dev"])],
)
def test_locks_hold_what_the_project_asks_for(lock: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    pinned = dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE))
    for requirement in map(Requirement, asked):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier


def test_nothing_names_a_folder_of_one_machine() -> None:
    home = re.compile(r"(?<![\w$}.])/(?:home|root|Users|work)/\w")
    texts = tracked("*.py", "*.md", "*.toml", "*.txt", "*.xml", "*.yml", "Makefile", "Dockerfile", ".ci/*")
    assert {str(path.relative_to(ROOT)) for path in texts if home.search(path.read_text())} == set()


def test_locks_of_npm_pin_every_package_by_hash_and_name_no_registry() -> None:
    locks = [json.loads(path.read_text()) for path in tracked("*package-lock.json")]
    packages = [one for lock in locks for name, one in lock["packages"].items() if name]
    assert packages
    assert [one for one in packages if "resolved" in one or "integrity" not in one] == []


def test_poms_name_no_registry() -> None:
    poms = tracked("*pom.xml")
    assert poms
    assert {str(pom.relative_to(ROOT)) for pom in poms if "<repositories>" in pom.read_text()} == set()
