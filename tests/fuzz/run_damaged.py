"""Damaged inputs of a target's corpus through it, the same ones every time; for longer, with another seed:

python -m tests.fuzz.run_damaged decoded_records 100000 7
"""

from __future__ import annotations

import random
import sys

from tests.fuzz.make_corpus import CORPUS
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS


def inputs(target: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target).iterdir())}


def run_damaged(target: str, rounds: int, seed: str = "") -> int:
    """Returns how many inputs the target accepted. Raises the target's error, with the input."""
    rng = random.Random(target + seed)
    corpus = list(inputs(target).values())
    accepted = 0
    for _ in range(rounds):
        data = mutated(rng.choice(corpus), corpus, rng)
        try:
            accepted += TARGETS[target](data)
        except Exception as error:
            error.add_note(f"input {data.hex()}")
            raise
    return accepted


if __name__ == "__main__":
    name, count, *other_seed = sys.argv[1:]
    print(run_damaged(name, int(count), "".join(other_seed)), "accepted of", count)
