"""The limit of open files: a process of its own has a low one, and fits its connections to it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from proxy.config import LimitsConfig
from proxy.process.checks.open_files import fit_open_files
logging.basicConfig(stream=sys.stdout, format="%(message)s")
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(fit_open_files(LimitsConfig(max_connections=connections)).max_connections)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def fitted(soft: int, hard: int, connections: int) -> list[str]:
    """Returns the lines of the log, the limit of connections and the soft limit of open files."""
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard), str(connections)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_the_soft_limit_rises_as_far_as_it_is_needed() -> None:
    assert fitted(256, 2_000, 500) == ["500", "1512"]


def test_a_soft_limit_that_suffices_stays() -> None:
    assert fitted(1_600, 2_000, 500) == ["500", "1600"]


def test_connections_that_do_not_fit_the_files_are_fewer_and_said() -> None:
    line, connections, files = fitted(256, 2_000, 10_000)
    assert (connections, files) == ("744", "2000")
    assert line.startswith("this process may open 2000 files, but 10000 connections need 20512: it accepts 744")


@pytest.mark.parametrize(("hard", "connections"), [(2_000, "744"), (200, "50")])
def test_no_limit_of_connections_means_what_fits_the_files(hard: int, connections: str) -> None:
    assert fitted(hard, hard, 0)[0] == connections
