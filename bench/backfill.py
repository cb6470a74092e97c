"""How fast does one consumer with default settings read history, by the store that has it?

One Java consumer (`kafka-consumer-perf-test`) reads one partition from its first record. The stores are a folder of
this machine, and an S3 server behind the modelled stores. Kafka's own tiered storage reads from a folder, with the
delay and rate of the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from bench.clients.java_tools import Rate
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Processes, Watch, tree
from bench.measure.results import ScenarioResult, reading
from bench.rig.stage import BROKER, FOLDER, NATIVE, TIDEGATE, Stage, processes_of
from bench.rig.store_model import FAR, NEAR, PLAIN, StoreModel

GIB = 1024.0
SLOW_READ_S = 5.0
"""A peer reads at most about this long in each round."""
STORES: dict[str, StoreModel | None] = {"folder": None, "near": NEAR, "far": FAR}


def measure(
    result: ScenarioResult,
    case: str,
    way: str,
    number: int,
    processes: dict[str, Processes],
    read: Callable[[], Rate],
    client: Processes,
) -> Rate:
    """Adds the rate of a read, and the CPU seconds of each server per GiB."""
    with Watch({**processes, "client": client}) as watch:
        rate = read()
    figures = {"mib_per_s": rate.mib_per_s}
    for name, cpu_s in watch.span.cpu_s.items():
        figures[f"{name}_cpu_s_per_gib"] = cpu_s / rate.mib * GIB
    result.readings.append(reading(case, way, number, figures, watch.span))
    return rate


def run(stage: Stage, stores: dict[str, StoreModel | None] = STORES, *, with_native: bool = True) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    java, local = stage.java, stage.local_history

    def client() -> list[int]:
        return tree(java.pid)

    brokers = stage.kafka.bootstrap_servers
    with ExitStack() as stack:
        reads: list[tuple[str, str, dict[str, Processes], Callable[[], Rate]]] = []
        broker_cpu: Processes = processes_of(stage.kafka)

        def direct() -> Rate:
            return java.consume(brokers, local.topic, local.mib)

        reads.append(("no store", BROKER, {"server": broker_cpu}, direct))
        for name, model in stores.items():
            history = stage.folder_history if model is None else stage.s3_history
            proxy = stack.enter_context(stage.tidegate(FOLDER if model is None else model, history.topic))
            servers: dict[str, Processes] = {"server": processes_of(proxy), "broker": broker_cpu}
            if model is not None:
                servers["store"] = processes_of(stage.modelled(model))
                servers["s3"] = processes_of(stage.s3)

            def through(
                bootstrap: str = proxy.bootstrap_servers, topic: str = history.topic, mib: int = history.mib
            ) -> Rate:
                return java.consume(bootstrap, topic, mib)

            reads.append((name, TIDEGATE, servers, through))
        for name, model in stores.items() if with_native else ():
            natively = _natively(stage, model or PLAIN)
            reads.append((name, NATIVE, {"server": processes_of(stage.native)}, natively))
        direct()  # Java compiles its hot paths
        for number in range(stage.size.rounds):
            for case, way, servers, read in reads:
                measure(result, case, way, number, servers, read, client)
    return result


def _natively(stage: Stage, model: StoreModel) -> Callable[[], Rate]:
    """Returns a read from the native tier. A read from a slow store is shorter: the rate is even."""
    history = stage.native_history
    latency_s = model.first_byte_ms / 1000 + ((1 << 20) / model.bytes_per_s if model.bytes_per_s else 0)
    mib = min(history.mib, int(SLOW_READ_S / latency_s)) if latency_s else history.mib

    def read() -> Rate:
        stage.native.set_model(model)
        return stage.java.consume(stage.native.bootstrap_servers, history.topic, mib)

    return read


def main() -> int:
    arguments = parser_of(__doc__)
    arguments.add_argument("--store", choices=sorted(STORES), action="append", help="only this store")
    arguments.add_argument("--without-native", action="store_true", help="leave out Kafka's own tiered storage")
    given = arguments.parse_args()
    chosen = {name: STORES[name] for name in given.store or STORES}
    return run_scenarios([lambda stage: run(stage, chosen, with_native=not given.without_native)], given)


if __name__ == "__main__":
    end_with(main)
