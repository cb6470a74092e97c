"""`make bench`: runs the scenarios on one set of servers, and writes a report.

`python -m bench NAME ...` runs only the named scenarios. Every scenario is a module of its own with more options:
`python -m bench.tail_and_backfill --help`.
"""

from __future__ import annotations

from bench import (
    backfill,
    copying,
    empty_polls,
    first_record,
    idle_connections,
    partition_sizes,
    pass_through,
    round_trip,
    small_segments,
    store_model,
    tail_and_backfill,
    workers,
)
from bench.command import Scenario, parser_of, run_scenarios
from bench.ending import run as end_with

SCENARIOS: dict[str, Scenario] = {
    "tail_and_backfill": tail_and_backfill.run,
    "first_record": first_record.run,
    "backfill": backfill.run,
    "pass_through": pass_through.run,
    "partition_sizes": partition_sizes.run,
    "round_trip": round_trip.run,
    "copying": copying.run,
    "workers": workers.run,
    "empty_polls": empty_polls.run,
    "idle_connections": idle_connections.run,
    "small_segments": small_segments.run,
    "store_model": store_model.run,
}
"""In the order of the report."""


def main() -> int:
    arguments = parser_of(__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"a scenario: {', '.join(SCENARIOS)}")
    given = arguments.parse_args()
    if unknown := set(given.names) - set(SCENARIOS):
        arguments.error(f"there is no scenario {', '.join(sorted(unknown))}")
    return run_scenarios([SCENARIOS[name] for name in given.names or SCENARIOS], given)


if __name__ == "__main__":
    end_with(main)
