"""`offload_rounds`: an offload again and again, as a service runs it.

A round that fails does not end the service: brokers, stores and Spark come back. The pause doubles with every round in
a row that fails, or copies nothing for all its troubles. A round that would copy nothing takes no ownership from the
proxies. An interrupt ends the round that is under way as it ends any run: nothing is left, and what was owned is given
back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Never

from pipeline.job import JobError
from pipeline.offload.driver import OffloadReport
from tiers.console import say
from tiers.errors import RemoteLogError
from tiers.open_tier import RemoteTierError

MAX_PAUSE_S: Final = 900.0
_MAX_DOUBLINGS: Final = 16


def offload_rounds(
    has_work: Callable[[], bool],
    run: Callable[[], OffloadReport],
    show: Callable[[OffloadReport], None],
    interval_s: float,
    wait: Callable[[float], object],
) -> Never:
    """Ends by what `wait` or a round raises; of a round's own trouble only what does not pass."""
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
    """After so many rounds in a row that failed."""
    return min(interval_s * 2.0 ** min(failures, _MAX_DOUBLINGS), max(interval_s, MAX_PAUSE_S))
