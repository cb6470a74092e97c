"""`offload`: copies log data from the brokers to the remote tier in waves of plan, copy and commit.

* The driver owns the metadata partitions of its topics while it runs (`owned_tier`). The proxies neither copy nor trim
  there meanwhile. The driver trims nothing.
* In a wave, the driver checks each partition as an owner does and announces its tiles, the executors copy them, and the
  driver commits the valid results. A run may end at any moment: the metadata holds every name that an attempt may have
  used, so this driver or the next owner finishes or deletes them by name, and the next run continues from the metadata.
* If a partition cannot be read or fails repeatedly, the driver leaves it alone, reports it and continues with the
  others.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Never

from pipeline.chosen_partitions import NothingChosenError, nothing_chosen
from pipeline.config import PipelineConfig
from pipeline.job_services import job_services, tiered_policies
from pipeline.offload.driver import NothingTieredYet, OffloadDriver, OffloadOptions, OffloadReport, PlannedPartition
from pipeline.offload.task import OffloadResult, OffloadTask, copy_tiles
from pipeline.spark.job import LOST_GRACE_S
from pipeline.worker import on_thread, worker
from tiers.access.open_tier import (
    OpenTier,
    RemoteTierError,
    open_key_ring,
    open_storage,
    open_tier,
    owned_tier,
    segments_without_metadata,
    storage_cluster_id,
    tiered_cluster,
)
from tiers.access.progress import SILENCE, Progress
from tiers.broker.tls import TlsError
from tiers.config.tier_config import ConfigError
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import RemoteLogError
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition
from tiers.tasks.copy.uncopied import copy_hold
from tiers.upkeep.runner import JobError, Runner

_NO_SPOOL = Path(tempfile.gettempdir())
"""The driver spools nothing, because the executors make the segments."""

RunTasks = Callable[[Sequence[OffloadTask]], list[OffloadResult]]


def offload(
    config: PipelineConfig, runner: Runner, options: OffloadOptions, progress: Progress = SILENCE
) -> OffloadReport:
    """Runs one offload until only young tails are left. Raises `JobError`, `RemoteTierError`."""

    def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
        return worker().run(runner.run("offload", tasks, partial(on_thread, copy_tiles)))

    return run_offload(
        config, options, run, runner.parallelism, is_speculative=runner.is_speculative, progress=progress
    )


def plan_offload(
    config: PipelineConfig, options: OffloadOptions, progress: Progress = SILENCE
) -> list[PlannedPartition]:
    """Returns what a run would copy now, partition by partition. It takes no ownership and changes nothing."""

    async def plan() -> list[PlannedPartition]:
        async with _tier_as_it_is(config, progress) as tier:
            policies = await _policies(tier, options)
            with job_services(tier, _NO_SPOOL) as services:
                driver = OffloadDriver(tier, config, options, policies, 1, services)
                await driver.survey()
                return [one for one in [await driver.planned(each) for each in driver.partitions] if one.segments]

    return worker().run(plan())


def run_offload(
    config: PipelineConfig,
    options: OffloadOptions,
    run: RunTasks,
    parallelism: int,
    *,
    is_speculative: bool = False,
    progress: Progress = SILENCE,
) -> OffloadReport:
    """Runs one offload with `run` in place of a runner.

    `run` returns the results in the order of the tasks and may run them anywhere. If `is_speculative` is true, two
    attempts of a task may run at the same time."""
    policies: list[TopicPolicy] = []

    async def choose(tier: OpenTier) -> Iterable[TopicIdPartition]:
        policies.extend(await _policies(tier, options))
        return [partition for policy in policies for partition in policy.partitions()]

    began_s = time.monotonic()
    with (
        worker().hold(owned_tier(config, choose, options.claim_timeout_ms, is_new=True, progress=progress)) as tier,
        job_services(tier, _NO_SPOOL) as services,
    ):
        driver = OffloadDriver(tier, config, options, policies, parallelism, services, is_speculative=is_speculative)
        try:
            worker().run(driver.survey())
            worker().run(driver.collect())
            while tasks := worker().run(driver.next_wave()):
                progress.say(
                    f"offload: wave {driver.waves}, {len(tasks)} partitions, {driver.copied_bytes} bytes copied so far"
                )
                results = run(tasks)
                if is_speculative or any(one.attempt > 0 for one in results):
                    time.sleep(LOST_GRACE_S)
                worker().run(driver.commit(results))
                if driver.is_failing:
                    time.sleep(options.failure_pause_s)
            worker().run(driver.collect())
        except BaseException:
            if driver.under_way:
                time.sleep(LOST_GRACE_S)
            with suppress(RemoteLogError):
                worker().run(driver.abandon())
            raise
        return driver.report(time.monotonic() - began_s)


@asynccontextmanager
async def _tier_as_it_is(config: PipelineConfig, progress: Progress) -> AsyncIterator[OpenTier]:
    """Opens the tier without changing it: if nothing was tiered yet, it creates no metadata topic."""
    async with tiered_cluster(config, is_new=True) as (client, cluster):
        if config.remote_log.metadata_topic in cluster.topics:
            async with open_tier(config, progress) as tier:
                yield tier
            return
        cluster_id = storage_cluster_id(config, cluster.cluster_id)
        async with open_storage(config, cluster.cluster_id) as storage:
            refusal = await segments_without_metadata(config, cluster_id, storage)
            if refusal is not None:
                raise RemoteTierError(refusal)
            with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
                metadata = NothingTieredYet(client, TopicBasedSettings(Path(folder)))
                try:
                    await metadata.open()
                    yield OpenTier(
                        config,
                        client,
                        cluster,
                        metadata,
                        progress,
                        storage=storage,
                        key_ring=open_key_ring(config),
                    )
                finally:
                    await metadata.close()


async def _policies(tier: OpenTier, options: OffloadOptions) -> list[TopicPolicy]:
    """Returns the policies of the chosen topics. Raises `NothingChosenError` if there are none, `BrokerError`."""
    try:
        wanted = re.compile(options.topics)
    except re.error as error:
        raise NothingChosenError(f"{options.topics!r} is not a regular expression: {error}") from error
    copied = [policy for policy in await tiered_policies(tier) if copy_hold(policy) is None]
    chosen = [policy for policy in copied if wanted.fullmatch(policy.topic)]
    if not chosen:
        raise nothing_chosen("tiered topic with copying enabled", options.topics, (one.topic for one in copied))
    return sorted(chosen, key=lambda policy: policy.topic)


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
    """Repeats offloads, for a service, until `wait` or a round raises.

    A failed round does not end the service, because brokers, stores and Spark may recover. The pause doubles with each
    consecutive round that fails, or that reports errors and copies nothing. If there is nothing to copy, a round takes
    no ownership from the proxies. An interrupt ends the current round like any run: it leaves nothing behind and gives
    up its ownership. A mistake in the settings ends the service only until a round has gone through. Later, a file that
    they name may be missing for a moment."""
    failures, may_be_wrong = 0, True
    while True:
        try:
            report = run() if has_work() else None
            may_be_wrong = False
            if report is not None:
                show(report)
            is_failing = report is not None and bool(report.troubles) and report.log_bytes == 0
            failures = failures + 1 if is_failing else 0
        except (JobError, RemoteTierError, RemoteLogError, ConfigError, TlsError) as error:
            if may_be_wrong and isinstance(error, ConfigError | TlsError):
                raise
            failures += 1
            say(f"offload: {' '.join(str(error).split())}; again in {pause_s(interval_s, failures):g} s")
        wait(pause_s(interval_s, failures))


def pause_s(interval_s: float, failures: int) -> float:
    """Returns the pause after the given number of consecutive failed rounds."""
    return min(interval_s * 2.0 ** min(failures, _MAX_DOUBLINGS), max(interval_s, MAX_PAUSE_S))
