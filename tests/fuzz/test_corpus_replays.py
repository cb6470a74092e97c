"""Every input of the corpus, and damaged ones, through its target: what fuzzing found stays found, without atheris."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz.make_corpus import CORPUS, MAX_SEED_BYTES
from tests.fuzz.run_damaged import inputs, run_damaged
from tests.fuzz.targets import TARGETS

ROUNDS = 2_000
"""About ten seconds for all targets together."""
FEW_ROUNDS = {"connections": 50}
"""A program takes much longer than a message."""
MACHINE_CODE = {"decoded_records"}
"""What could take the process with it: it gets one of its own."""


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_holds(target: str) -> None:
    accepted = []
    for name, data in inputs(target).items():
        try:
            if TARGETS[target](data):
                accepted.append(name)
        except Exception as error:
            error.add_note(f"input {CORPUS.name}/{target}/{name}")
            raise
    assert len(accepted) >= 4, "a target that takes nothing proves nothing"


@pytest.mark.parametrize("target", TARGETS)
def test_damage_is_refused_or_read_in_one_way(target: str) -> None:
    if target not in MACHINE_CODE:
        run_damaged(target, FEW_ROUNDS.get(target, ROUNDS))
        return
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.run_damaged", target, str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_corpus_stays_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) <= 400
    assert max(path.stat().st_size for path in files) <= MAX_SEED_BYTES
    assert {path.parent.name for path in files} == set(TARGETS)
