"""How much memory does an idle connection take?

Each connection has sent one ApiVersions request and has its answer. So a proxy has a connection to the broker for it.
"""

from __future__ import annotations

import time

from bench.clients.many_connections import ManyConnections
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch, resident_mib
from bench.measure.results import ScenarioResult, reading
from bench.rig.relays import ways
from bench.rig.stage import BROKER, Stage, most_connections

SETTLE_S = 1.0


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    count = min(stage.size.connections, most_connections())
    if count < stage.size.connections:
        result.notes.append(
            f"The limit of open files allows {count:,} connections instead of {stage.size.connections:,}."
        )
    with ways(stage, result.notes) as found:
        for way in found:
            if way.name == BROKER:
                continue
            before = resident_mib(way.processes())
            with Watch({"server": way.processes}) as watch, ManyConnections(way.port, count) as connections:
                connections.wait_for_lines()
                time.sleep(SETTLE_S)
                after = resident_mib(way.processes())
            figures = {"kib_per_connection": (after - before) * 1024 / count, "mib_before": before, "mib_after": after}
            result.readings.append(reading(f"{count:,} connections", way.name, 0, figures, watch.span))
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
