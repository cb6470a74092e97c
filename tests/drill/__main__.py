"""`python -m tests.drill`: runs a drill on its own servers. Exit code 1: an invariant broke, or too little was done.

--seconds 600 --seed 7 --proxies 5
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tests.drill.engine import Drill, DrillError, DrillResult, DrillSettings
from tests.drill.report import show
from tests.drill.rig import DrillRig
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import SHRINKS_SOON, KafkaCluster
from tests.support.servers.versitygw import VersityGateway

PHASES = [2, 5]
"""The numbers of proxies. There is one drill for each, one after the other."""
FAULTS_PER_S = 1 / 25
RECORDS_PER_S = 50.0


def too_little(result: DrillResult, seconds: float) -> list[str]:
    """Returns what a drill of `seconds` should have done more of. A drill that did too little proves nothing."""
    wanted = {
        "faults": (result.faults.total(), int(seconds * FAULTS_PER_S)),
        "acknowledged records": (result.certain, int(seconds * RECORDS_PER_S)),
        "checked records": (result.checked, int(2 * seconds * RECORDS_PER_S)),
        "trimmed offsets": (result.trimmed_offsets, int(seconds * RECORDS_PER_S / 4)),
    }
    return [f"{done:,} {what}, at least {least:,} expected" for what, (done, least) in wanted.items() if done < least]


@contextmanager
def rig_of_its_own(console: Console, proxies: int) -> Iterator[DrillRig]:
    home = Path(tempfile.mkdtemp(prefix="tidegate-drill-"))
    rig = None
    try:
        with KafkaCluster(settings=SHRINKS_SOON) as cluster, VersityGateway() as gateway:
            rig = DrillRig(cluster, gateway, home, proxies=proxies)
            try:
                rig.start()
                yield rig
            finally:
                rig.stop()
    except BaseException:
        if rig is not None:
            console.print("the proxies' output: " + ", ".join(str(each.process.output) for each in rig.proxies))
        raise
    finally:
        shutil.rmtree(home, ignore_errors=True)


def drill(console: Console, seed: int, seconds: float, proxies: int) -> bool:
    """Runs a drill. Returns whether all invariants held and enough was done."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"{proxies} proxies, {seconds:.0f} s, seed {seed}")
    try:
        with rig_of_its_own(console, proxies) as rig:
            result = Drill(rig, DrillSettings(seed, seconds), say).run()
    except (ServerUnavailable, DrillError) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return False
    show(console, result, proxies)
    missing = too_little(result, seconds)
    for one in missing:
        console.print(f"too little was done: {one}", style="red", highlight=False)
    if result.has_held:
        rig.remove_folders()
    else:
        say("the proxies' output: " + ", ".join(str(each.process.output) for each in rig.proxies))
    return result.has_held and not missing


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.drill")
    arguments.add_argument("--seconds", type=float, default=600.0)
    arguments.add_argument("--seed", type=int, default=None, help="The seed of an earlier drill, to repeat its plan.")
    arguments.add_argument(
        "--proxies", type=int, default=None, help="2 to 9. Default: two proxies for the first half, then five."
    )
    given = arguments.parse_args()
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    console = Console(width=None if sys.stdout.isatty() else 120)
    phases = [given.proxies] if given.proxies else PHASES
    # All drills run, even if the first one fails.
    held = [drill(console, seed, given.seconds / len(phases), proxies) for proxies in phases]
    verdict = "everything held" if all(held) else f"SEED={seed} repeats it"
    console.print(verdict, style="green" if all(held) else "red", highlight=False)
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
