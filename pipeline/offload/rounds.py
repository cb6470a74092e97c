"""`offload_rounds`: repeats an offload, for a service.

A failed round does not end the service, because brokers, stores and Spark may recover. The pause doubles with each
consecutive round that fails, or that reports errors and copies nothing. If there is nothing to copy, a round takes no
ownership from the proxies. An interrupt ends the current round like any run: it leaves nothing behind and gives up its
ownership.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Never

from pipeline.offload.driver import OffloadReport
from pipeline.spark.job import JobError
from tiers.access.open_tier import RemoteTierError
from tiers.errors import RemoteLogError

MAX_PAUSE_S: Final = 900.0
_MAX_DOUBLINGS: Final = 16


def offload_rounds(
    has_work: Callable[[], bool],
    run: Callable[[], OffloadReport],
    show: Callable[[OffloadReport], None],
    interval_s: float,
    wait: Callable[[float], object],
    say: Callable[[str], None],
) -> Never:
    """Repeats rounds until `wait` or a round raises. Errors of a round that may be temporary do not end the loop."""
    failures = 0
    while True:
        try:
            report = run() if has_work() else None
            if report is not None:
                show(report)
            is_failing = report is not None and bool(report.troubles) and report.log_bytes == 0
            failures = failures + 1 if is_failing else 0
        except (JobError, RemoteTierError, RemoteLogError) as error:
            failures += 1
            say(f"offload: {' '.join(str(error).split())}; again in {pause_s(interval_s, failures):g} s")
        wait(pause_s(interval_s, failures))


def pause_s(interval_s: float, failures: int) -> float:
    """Returns the pause after the given number of consecutive failed rounds."""
    return min(interval_s * 2.0 ** min(failures, _MAX_DOUBLINGS), max(interval_s, MAX_PAUSE_S))
