"""What do producers and consumers at the tail of a topic feel while 0, 1, 4 and 16 consumers backfill?

Run `python -m bench.tail_and_backfill` for the servers that the benchmark starts itself. For a cluster of your own, run
`python -m bench.tail_and_backfill --bootstrap HOST:PORT --topic T`, with a topic that exists for this purpose: the
benchmark WRITES small records to its partition 0, 200 in a second, and reads all its partitions again and again from
their first record. `--fill-mib N` first writes N MiB of history to the topic. Give `--bootstrap NAME=HOST:PORT` several
times to compare, for example, a proxy with the brokers behind it. `-X KEY=VALUE` is a setting of librdkafka, such as
`security.protocol=sasl_ssl`.

In a round, each way has one probe that writes and reads at the tail, and more and more consumers beside it. The ways
take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console

from bench.clients.backfill_reader import BackfillReader, Range
from bench.clients.librdkafka import TIMEOUT_S, Target, pairs
from bench.clients.tail_probe import RATE_PER_S, RECORD_BYTES, TailProbe, TailSample
from bench.command import finish, new_run, parser_of, question_of, run_scenarios, show
from bench.ending import run as end_with
from bench.measure.processes import Processes, Watch
from bench.measure.results import Phase, ScenarioResult, Timeline, reading
from bench.measure.statistics import amount_between, percentile, spread_begin
from bench.report import page
from bench.rig.size import DEFAULT
from bench.rig.stage import BROKER, NATIVE, TIDEGATE, Stage, processes_of
from bench.rig.store_model import FAR

CONSUMERS = (0, 1, 4, 16)
SETTLE_S = 1.0
SLICE_S = 0.2
MB = 1_000_000
TAIL = "tail"


@dataclass(frozen=True)
class Contender:
    """One way from clients to records: the topic whose tail is probed, and the ranges that are backfilled."""

    name: str
    tail: Target
    backfill: Target
    ranges: Sequence[Range]
    processes: Processes = field(default=lambda: ())


def measure(
    result: ScenarioResult,
    contenders: Sequence[Contender],
    rounds: int,
    phase_s: float,
    consumers: Sequence[int] = CONSUMERS,
) -> None:
    for number in range(rounds):
        for contender in contenders:
            one_round(result, contender, number, phase_s, consumers)


def one_round(
    result: ScenarioResult, contender: Contender, number: int, phase_s: float, consumers: Sequence[int]
) -> None:
    with ExitStack() as stack:
        probe = stack.enter_context(TailProbe(contender.tail))
        probe.wait_for_lines()
        readers: list[BackfillReader] = []
        progress: list[list[tuple[float, float]]] = []
        """The time and the bytes so far, for each reader."""
        samples: list[TailSample] = []
        phases: list[Phase] = []
        probe.take()
        began = time.monotonic()
        for count in consumers:
            started = []
            for index in range(len(readers), count):
                over = contender.ranges[index % len(contender.ranges)]
                # Each reads another part of the history, as consumers of different groups do.
                reader = BackfillReader(contender.backfill, over, begin_at=spread_begin(index))
                started.append(stack.enter_context(reader))
                progress.append([])
            for reader in started:
                reader.wait_for_lines()
            readers += started
            time.sleep(SETTLE_S)
            phase_began = time.monotonic()
            with Watch({contender.name: contender.processes}) as watch:
                time.sleep(phase_s)
            phases.append(Phase(count, phase_began - began, time.monotonic() - began))
            samples += probe.samples()
            for reader, seen in zip(readers, progress, strict=True):
                seen += [(line[0], line[1]) for line in reader.take()]
            within = [one for one in samples if phase_began <= one.at_s < phase_began + phase_s]
            rate = sum(amount_between(seen, phase_began, phase_began + phase_s) for seen in progress) / phase_s / MB
            figures = {
                "backfill_mb_per_s": rate,
                "cpu_s": watch.span.cpu_s[contender.name],
                "cpu_share": watch.span.cpu_s[contender.name] / watch.span.seconds,
                "late_p99_ms": percentile([one.late_ms for one in within], 0.99),
            }
            for kind in ("consume", "produce"):
                values = [getattr(one, f"{kind}_ms") for one in within]
                for share, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p999"), (1.0, "max")):
                    figures[f"{kind}_{name}_ms"] = percentile(values, share)
            result.readings.append(reading(case_of(count), contender.name, number, figures, watch.span))
        result.timelines.append(_timeline(contender.name, number, phases, samples, progress, began))


def case_of(consumers: int) -> str:
    return f"{consumers} backfills" if consumers != 1 else "1 backfill"


def _timeline(
    name: str,
    number: int,
    phases: list[Phase],
    samples: Sequence[TailSample],
    progress: Sequence[Sequence[tuple[float, float]]],
    began: float,
) -> Timeline:
    slices = int((phases[-1].end_s) / SLICE_S)
    backfill: list[tuple[float, float]] = []
    for index in range(slices):
        begin = began + index * SLICE_S
        read = sum(amount_between(seen, begin, begin + SLICE_S) for seen in progress)
        backfill.append((round(index * SLICE_S, 3), round(read / SLICE_S / MB, 1)))
    tail = [(round(one.at_s - began, 4), round(one.produce_ms, 3), round(one.consume_ms, 3)) for one in samples]
    return Timeline(name, number, phases, sorted(tail), backfill)


def run(
    stage: Stage, consumers: Sequence[int] = CONSUMERS, *, with_native: bool = True, workers: int = 0
) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    history, local, brokers = stage.s3_history, stage.local_history, stage.kafka.bootstrap_servers
    stage.topic(stage.kafka, TAIL)
    with stage.tidegate(FAR, history.topic, workers=workers) as proxy:
        through = proxy.bootstrap_servers
        direct = Target(brokers, TAIL), Target(brokers, local.topic)
        tiered = Target(through, TAIL), Target(through, history.topic)
        contenders = [
            Contender(BROKER, *direct, [local.range], processes_of(stage.kafka)),
            Contender(TIDEGATE, *tiered, [history.range], processes_of(proxy)),
        ]
        if with_native:
            contenders.append(_native(stage))
        measure(result, contenders, stage.size.long_rounds, stage.size.phase_s, consumers)
    result.notes.append(
        f"The broker alone reads the backfills from its own log. The others read them from the modelled store {FAR}. "
        f"The probe writes {RATE_PER_S:.0f} records of {RECORD_BYTES} bytes in a second."
    )
    return result


def _native(stage: Stage) -> Contender:
    brokers, history = stage.native.bootstrap_servers, stage.native_history
    stage.topic(stage.native, TAIL)
    stage.native.set_model(FAR)
    targets = Target(brokers, TAIL), Target(brokers, history.topic)
    return Contender(NATIVE, *targets, [history.range], processes_of(stage.native))


def ranges_of(target: Target) -> list[Range]:
    """Returns the records of every partition that has any."""
    consumer = Consumer(target.consumer_settings())
    try:
        topic = consumer.list_topics(target.topic, TIMEOUT_S).topics[target.topic]
        if topic.error is not None:
            sys.exit(f"the topic {target.topic} cannot be read: {topic.error}")
        bounds = {
            partition: consumer.get_watermark_offsets(TopicPartition(target.topic, partition), TIMEOUT_S, cached=False)
            for partition in topic.partitions
        }
    finally:
        consumer.close()
    return [Range(partition, start, end) for partition, (start, end) in bounds.items() if end > start]


def fill(target: Target, mib: int) -> None:
    """Writes records of 1 KiB to all partitions."""
    producer = Producer({**target.producer_settings(), "linger.ms": 20})
    for _ in range(mib * 1024):
        while True:
            try:
                producer.produce(target.topic, os.urandom(1024))
                break
            except BufferError:
                producer.poll(0.1)
    if left := producer.flush(TIMEOUT_S):
        sys.exit(f"{left} records were not acknowledged within {TIMEOUT_S:.0f} s")


def run_on(given: argparse.Namespace) -> ScenarioResult:
    """Measures the clusters of `--bootstrap`."""
    result = ScenarioResult(Path(__file__).stem, question_of(__doc__))
    contenders: list[Contender] = []
    for bootstrap in given.bootstrap:
        name, found, servers = bootstrap.rpartition("=")
        target = Target(servers, given.topic, pairs(given.settings))
        if given.fill_mib and not contenders:
            fill(target, given.fill_mib)
        if not (ranges := ranges_of(target)):
            sys.exit(f"{given.topic} has no record to backfill: write some with --fill-mib 1024")
        contenders.append(Contender(name if found else servers, target, target, ranges))
    measure(result, contenders, given.rounds or 1, given.phase_s, given.consumers)
    return result


def main() -> int:
    arguments = parser_of(__doc__)
    arguments.add_argument("--bootstrap", action="append", help="a cluster of your own: HOST:PORT or NAME=HOST:PORT")
    arguments.add_argument("--topic", help="its topic, which gets records in partition 0")
    arguments.add_argument("-X", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    arguments.add_argument("--fill-mib", type=int, default=0)
    arguments.add_argument("--phase-s", type=float, default=DEFAULT.phase_s)
    arguments.add_argument("--consumers", type=int, nargs="+", default=CONSUMERS, help="how many backfill (rising)")
    arguments.add_argument("--workers", type=int, default=0, help="Tidegate's `workers`")
    arguments.add_argument("--without-native", action="store_true", help="leave out Kafka's own tiered storage")
    given = arguments.parse_args()
    if given.bootstrap is None:
        options = {"with_native": not given.without_native, "workers": given.workers}
        return run_scenarios([lambda stage: run(stage, given.consumers, **options)], given)
    if given.topic is None:
        arguments.error("--bootstrap needs --topic")
    began, measured = time.monotonic(), new_run(given)
    result = run_on(given)
    measured.seconds = result.seconds = round(time.monotonic() - began, 1)
    show(Console(), result)
    finish(measured, [result], given)
    print(f"The report: {given.out / page.NAME}")
    return 0


if __name__ == "__main__":
    end_with(main)
