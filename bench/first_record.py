"""How long does a consumer wait for the first record after it seeks to a random offset, by the tier that has it?

A consumer (librdkafka) seeks to offsets in different segments, which nobody has read since the server started. Then it
seeks to the same offsets again, which the caches may have now. Every round starts new proxies with an empty state: they
have not copied the segments themselves, so they read an index from the store before they read the records.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.clients.librdkafka import Target
from bench.clients.seeks import Place, first_records
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch
from bench.measure.results import ScenarioResult, reading
from bench.rig.stage import BROKER, NATIVE, SEGMENT_BYTES, TIDEGATE, History, Stage
from bench.rig.store_model import FAR

LOCAL, FIRST, AGAIN = "local tier", "far store, first", "far store, again"
WORKERS = (0, 2)
PAUSE_S = 0.02


def places_of(history: History, count: int, seed: int) -> list[Place]:
    """Returns random offsets, each in a segment of its own: `count` and one more, if there are that many segments."""
    drawn = random.Random(seed)
    records = SEGMENT_BYTES // 1024
    starts = range(history.range.start, history.range.end - records, records)
    chosen = drawn.sample(starts, min(count + 1, len(starts)))
    return [(history.range.partition, start + drawn.randrange(records)) for start in chosen]


def measure(result: ScenarioResult, case: str, way: str, number: int, target: Target, places: Sequence[Place]) -> None:
    with Watch({}) as watch:
        samples = first_records(target, places, PAUSE_S)
    result.readings.append(reading(case, way, number, {}, watch.span, samples))


def run(stage: Stage, *, with_native: bool = True) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    local, remote = stage.local_history, stage.s3_history
    for number in range(stage.size.long_rounds):
        places = places_of(local, stage.size.seeks, number)
        measure(result, LOCAL, BROKER, number, Target(stage.kafka.bootstrap_servers, local.topic), places)
        for workers in WORKERS:
            way = f"{TIDEGATE}, {workers} workers" if workers else TIDEGATE
            with stage.tidegate(FAR, remote.topic, workers=workers) as proxy:
                through = proxy.bootstrap_servers
                measure(result, LOCAL, way, number, Target(through, local.topic), places)
                elsewhere = places_of(remote, stage.size.seeks, number)
                for case in (FIRST, AGAIN):
                    measure(result, case, way, number, Target(through, remote.topic), elsewhere)
        if with_native:
            stage.native.set_model(FAR)
            history = stage.native_history
            elsewhere = places_of(history, stage.size.seeks, number)
            for case in (FIRST, AGAIN):
                measure(result, case, NATIVE, number, Target(stage.native.bootstrap_servers, history.topic), elsewhere)
    result.notes.append(
        f"The far store is {FAR}. One GET of an index and one of records take two of its delays. The broker of "
        f"{NATIVE} stays the same over all rounds, so its index cache has some of the indexes after the first round."
    )
    return result


def main() -> int:
    arguments = parser_of(__doc__)
    arguments.add_argument("--without-native", action="store_true", help="leave out Kafka's own tiered storage")
    given = arguments.parse_args()
    return run_scenarios([lambda stage: run(stage, with_native=not given.without_native)], given)


if __name__ == "__main__":
    end_with(main)
