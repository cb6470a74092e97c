"""Every input of the corpus, and damaged ones, through its target: what fuzzing found stays found, without atheris."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.make_corpus import CORPUS, MAX_SEED_BYTES
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS

ROUNDS = 2_000
"""About ten seconds for all targets together."""


def inputs(target: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target).iterdir())}


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
    rng = random.Random(target)
    corpus = list(inputs(target).values())
    for _ in range(ROUNDS):
        data = mutated(rng.choice(corpus), corpus, rng)
        try:
            TARGETS[target](data)
        except Exception as error:
            error.add_note(f"input {data.hex()}")
            raise


def test_the_corpus_stays_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) <= 400
    assert max(path.stat().st_size for path in files) <= MAX_SEED_BYTES
    assert {path.parent.name for path in files} == set(TARGETS)
