"""How much does a relay add to the round trip of one record?

A client sends Produce requests with one record each, one at a time. The relays and the broker take turns after every
request.
"""

from __future__ import annotations

from bench.clients.round_trips import round_trips
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch
from bench.measure.results import ScenarioResult, reading
from bench.measure.statistics import percentile
from bench.rig.relays import ways
from bench.rig.stage import BROKER, Stage

TOPIC = "round-trips"
CASE = "one record"


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    stage.topic(stage.kafka, TOPIC)
    with ways(stage, result.notes) as found:
        for number in range(stage.size.rounds):
            with Watch({way.name: way.processes for way in found}) as watch:
                samples = round_trips({way.name: way.port for way in found}, TOPIC, stage.size.round_trips)
            direct = samples[BROKER]
            for way in found:
                figures = {"cpu_us_per_request": watch.span.cpu_s[way.name] / len(samples[way.name]) * 1e6}
                if way.name == BROKER:
                    figures["cpu_us_per_request"] /= len(found)  # the requests of all relays reach it
                for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
                    figures[f"added_{name}"] = percentile(samples[way.name], share) - percentile(direct, share)
                result.readings.append(reading(CASE, way.name, number, figures, watch.span, samples[way.name]))
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
