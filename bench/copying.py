"""What does it cost to copy a topic to S3, with every segment read back and verified?

A producer writes a new topic directly to the broker, as fast as it can, and Tidegate copies it at the same time. A
round ends when most of the topic has left the broker. So the CPU seconds are those of all that copying needs: reading
from the broker, building and uploading segments, reading them back, the metadata, and the trim.
"""

from __future__ import annotations

import time

from bench.clients.java_tools import FILL, MIB
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Span, Watch, resident_mib
from bench.measure.results import ScenarioResult, reading
from bench.offsets import EARLIEST, list_offsets
from bench.rig.stage import MOVE_TIMEOUT_S, SEGMENT_BYTES, STAYING_RECORDS, TIDEGATE, Stage, processes_of
from tests.support.servers.producing import create_topic

PATTERN = "copied-*"
SETTLE_S = 2.0
REST_S = 3.0
GIB = 1024.0


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    mib = stage.size.passed_mib
    brokers = stage.kafka.bootstrap_servers
    measured: list[tuple[int, float, float, Span, float]] = []
    with stage.tidegate("s3", PATTERN, is_eager=True) as proxy:
        servers = {"tidegate": processes_of(proxy), "broker": processes_of(stage.kafka), "s3": processes_of(stage.s3)}
        for number in range(stage.size.rounds):
            topic = PATTERN.replace("*", str(number))
            create_topic(brokers, topic, config={"segment.bytes": str(SEGMENT_BYTES)})
            with Watch(servers) as watch:
                began = time.monotonic()
                stage.java.produce(brokers, topic, mib, FILL)
                moved_mib = _wait_until_moved(stage, topic, mib)
                seconds = time.monotonic() - began
            measured.append((number, moved_mib, seconds, watch.span, resident_mib(servers["tidegate"]())))
        time.sleep(SETTLE_S)
        with Watch(servers) as rest:
            time.sleep(REST_S)
    at_rest = rest.span.cpu_s["tidegate"] / rest.span.seconds
    for number, moved_mib, seconds, span, resident in measured:
        cpu_s = {**span.cpu_s, "tidegate": max(0.0, span.cpu_s["tidegate"] - at_rest * span.seconds)}
        figures = {f"{name}_cpu_s_per_gib": one / moved_mib * GIB for name, one in cpu_s.items()}
        figures |= {"mib_per_s": moved_mib / seconds, "tidegate_mib": resident}
        result.readings.append(reading("copy to S3", TIDEGATE, number, figures, span))
    result.notes.append(
        f"Tidegate at rest takes {at_rest:.1%} of a core, which is subtracted. The broker's CPU seconds include the "
        "producer's requests. MiB/s is from the first record to the trim of the last but two segments."
    )
    return result


def _wait_until_moved(stage: Stage, topic: str, mib: int) -> float:
    """Returns how many MiB have left the broker, once that is most of them."""
    records = mib * MIB // 1024
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    while (moved := list_offsets(stage.kafka.address(), topic, [0], EARLIEST).get(0, 0)) < records - STAYING_RECORDS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {moved / records:.0%} of {topic} left the broker")
        time.sleep(0.1)
    return moved * 1024 / MIB


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
