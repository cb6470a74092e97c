"""Coverage-guided fuzzing of one target:

    python -m tests.fuzz.run_atheris fetch_response -max_total_time=60

What follows the target goes to libFuzzer. New inputs are kept in `.cache/fuzz/`; one that breaks an invariant is
written to `.cache/fuzz/found-*`: made small, it belongs into `corpus/<target>/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

# numba compiles the kernels' bytecode as it was written.
with atheris.instrument_imports(
    include=["protocol", "tiers", "proxy", "pipeline"], exclude=["pipeline.decode.kernels"]
):
    from tests.fuzz.make_corpus import CORPUS
    from tests.fuzz.targets import TARGETS

CACHE = Path(__file__).parents[2] / ".cache" / "fuzz"


def main() -> None:
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    found = CACHE / name
    found.mkdir(parents=True, exist_ok=True)

    def test_one_input(data: bytes) -> None:
        target(data)

    atheris.Setup(
        [
            sys.argv[0],
            "-max_len=2047",
            "-rss_limit_mb=3000",
            "-timeout=20",
            f"-artifact_prefix={CACHE}/found-{name}-",
            *options,
            str(found),
            str(CORPUS / name),
        ],
        test_one_input,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
