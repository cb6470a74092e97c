"""Does the cost of a byte stay the same with more workers?

Eight consumers (librdkafka) read a topic of four partitions that is not tiered, through proxies with one process and
with several workers.
"""

from __future__ import annotations

from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.results import ScenarioResult
from bench.pass_through import measure_eight
from bench.rig.relays import Way
from bench.rig.stage import FOLDER, TIDEGATE, Stage, processes_of

WORKERS = (0, 1, 2, 4)


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    tiered = stage.folder_history.topic
    for number in range(min(2, stage.size.rounds)):
        for workers in WORKERS:
            with stage.tidegate(FOLDER, tiered, workers=workers) as proxy:
                way = Way(TIDEGATE, proxy.bootstrap_servers, proxy.address[1] + 1, processes_of(proxy))
                case = f"{workers} worker{'s' * (workers != 1)}" if workers else "one process"
                measure_eight(result, stage, case, way, number)
    result.notes.append("With workers, one more process copies and writes the metadata. Its CPU seconds count.")
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
