"""`tidegate check`: contacts every broker and the store, and reports the advertised addresses and all problems.

It also binds the ports that `tidegate serve` will bind, and reads the metadata topic, to find out whether it is lost,
which topics are not tiered, and which retentions are not in force."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import typer
from kafka.protocol.metadata import MetadataRequest

from proxy.cluster.broker_listeners import BOOTSTRAP_PORT, ListenerAddresses, shared_ports
from proxy.cluster.permissions import has_certificate_alone, missing_permissions, principal_of
from proxy.commands.certificate_check import certificate_findings
from proxy.commands.store_check import check_store
from proxy.commands.topic_check import topic_findings
from proxy.config import TidegateConfig, is_loopback
from proxy.listener_config import ListenerConfig
from proxy.logging_setup import set_up_logging
from proxy.process.app import listener_addresses
from proxy.process.checks.probes import state_folders, write_probe
from proxy.process.remote_log import METADATA_FOLDER
from proxy.process.start.settings_in_use import is_in_use
from proxy.process.start.settings_mistakes import settings_mistakes
from proxy.wire.context import Address
from proxy.wire.server import bind
from tiers.access.open_tier import RemoteTierError, open_storage, segments_without_metadata, storage_cluster_id
from tiers.broker.client import BrokerClient
from tiers.broker.tls import TlsError
from tiers.commands.console import FINDINGS, MISUSED
from tiers.config.topic_policy import NOTHING_TIERED
from tiers.config.upstream_config import broker_client
from tiers.errors import BrokerError, RemoteLogError, RemoteStorageError
from tiers.event_loop import EventLoop
from tiers.metadata.state.writer import is_written, saved_identity
from tiers.metadata.topic.metadata_topic import find_metadata_topic

TIMEOUT_MS = 10_000
_OF_TIER = ("the proxy's rights", "the topics")


@dataclass(frozen=True, slots=True)
class BrokerCheck:
    node_id: int
    address: Address
    advertised: list[Address]
    """Its address for the clients of each listener."""
    trouble: str | None
    """Why the broker itself cannot be reached. No check tries the advertised addresses."""

    def line(self) -> str:
        advertised = " and ".join(map(_text, self.advertised))
        return (
            f"broker {self.node_id}: {_text(self.address)}, {self.trouble or 'reached'}; advertised to clients as"
            f" {advertised}, which this check does not try"
        )


@dataclass(slots=True)
class Report:
    cluster_id: str | None = None
    brokers: list[BrokerCheck] = field(default_factory=list)
    store: str | None = None
    """The storage implementation, if the store answered."""
    warnings: list[str] = field(default_factory=list)
    tiered: str = ""
    """Which topics are tiered, and by which rule. Empty: that cannot be read."""
    rules: list[str] = field(default_factory=list)
    """The topics that each rule decides."""
    ports: str | None = None
    """Why the ports were not tried."""
    topic_remarks: list[str] = field(default_factory=list)
    """What an operator should know of topics, and what is no problem."""
    problems: list[str] = field(default_factory=list)
    is_misused: bool = False
    """Whether a problem lies in the settings, or in a file that they name."""
    skipped: list[str] = field(default_factory=list)
    """What was not checked, because it depends on a check that found a problem."""

    def lines(self) -> Iterator[str]:
        """Yields the report. The last line counts the problems and the warnings."""
        warnings = 0
        for line in self._findings():
            warnings += "warning: " in line
            yield line
        counts = [_count(len(self.problems), "problem")] + ([_count(warnings, "warning")] if warnings else [])
        yield ", ".join(counts)

    def _findings(self) -> Iterator[str]:
        if self.cluster_id is not None:
            yield f"cluster {self.cluster_id}"
        yield from (broker.line() for broker in self.brokers)
        if self.store is not None:
            yield f"store {self.store}: written, read and deleted"
        if self.ports is not None:
            yield f"ports: {self.ports}"
        if self.tiered:
            yield f"tiered: {self.tiered}"
        yield from self.rules
        yield from (f"topic {remark}" for remark in self.topic_remarks)
        yield from (f"warning: {warning}" for warning in self.warnings)
        for problem in self.problems:
            yield f"problem: {problem}"
        if self.skipped:
            yield f"not checked, because of these problems: {', '.join(self.skipped)}"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def checked(config: TidegateConfig, file: Path) -> int:
    """Prints the report about the settings of the file, and returns the exit code."""
    set_up_logging("error", "text")
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        report = runner.run(check(config, file))
    for line in report.lines():
        typer.echo(line)
    return MISUSED if report.is_misused else FINDINGS if report.problems else 0


async def check(config: TidegateConfig, file: Path | None = None) -> Report:
    """Reads the files of the settings, and contacts the brokers and the store. Problems become lines of the report.

    If a process serves by `file`, it has its ports, and they are not tried."""
    mistakes = list(settings_mistakes(config))
    report = Report(tiered="" if config.is_tiered else NOTHING_TIERED, problems=mistakes, is_misused=bool(mistakes))
    if config.is_tiered:
        report.problems += _folder_problems(config, file)
    if has_certificate_alone(config):
        report.problems.append(
            "[upstream.tls] certificate without [upstream.sasl]: the brokers take each client for the proxy itself,"
            " with all rights of the proxy: add [upstream.sasl], and use a listener of the brokers that requires SASL"
        )
    try:
        client = broker_client(config.upstream)
    except TlsError:  # one of the mistakes
        report.skipped += ["the brokers", *([*_OF_TIER] if config.is_tiered else [])]
        await _check_store(config, report)
        _check_ports(config, file, report)
        return report
    try:
        is_reached = await _check_brokers(config, client, report)
        has_store = await _check_store(config, report)
        if config.is_tiered:
            await _check_tier(config, client, report, is_reached=is_reached, has_store=has_store)
    finally:
        await client.close()
    _check_certificates(config, report)
    _check_ports(config, file, report)
    return report


async def _check_tier(
    config: TidegateConfig, client: BrokerClient, report: Report, *, is_reached: bool, has_store: bool
) -> None:
    """Runs the checks that do not depend on one that failed. They would report its problem once more."""
    if report.cluster_id is None:
        report.skipped += _OF_TIER
        return
    can_read = await _has_rights(config, client, report) and is_reached
    if can_read and config.remote_log.is_topic_based:
        lost = await metadata_topic_trouble(config, client, report.cluster_id, TIMEOUT_MS, has_store=has_store)
        report.problems += [] if lost is None else [lost]
        can_read = lost is None
    if not can_read:
        report.skipped.append("the topics")
        return
    report.skipped += [] if has_store else ["whether the metadata fits the store"]
    found = await topic_findings(config, client, has_store=has_store)
    report.tiered, report.rules, report.topic_remarks = found.tiered, found.rules, found.remarks
    report.problems += found.problems


def _folder_problems(config: TidegateConfig, file: Path | None) -> Iterator[str]:
    if is_written(config.state.path / METADATA_FOLDER) and not (file is not None and is_in_use(file)):
        yield f"[state] path: another proxy uses {config.state.path}: each proxy needs a folder of its own"
    for folder in sorted({_nearest(each) for each in state_folders(config).values()}):
        if not folder.is_dir():
            yield f"[state] path: {folder} is not a folder: change `path`"
            continue
        try:
            write_probe(folder / f".probe-{os.getpid()}")
        except OSError as error:
            said = "change its rights or its owner, or change `path`"
            yield f"[state] path: {folder} cannot be written: {error.strerror}: {said}"


def _nearest(path: Path) -> Path:
    """Returns the folder, or the one in which the proxy creates it."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))


async def _check_brokers(config: TidegateConfig, client: BrokerClient, report: Report) -> bool:
    """Returns whether each broker can be reached."""
    try:
        metadata = await client.metadata(TIMEOUT_MS)
    except BrokerError as error:
        servers = ", ".join(map(_text, config.upstream.bootstrap_servers))
        report.problems.append(f"[upstream] no broker answers at {servers}: {error}")
        return False
    report.cluster_id = metadata.cluster_id
    listeners = [listener_addresses(each) for each in config.listener]
    brokers = sorted(metadata.brokers.items())
    troubles = await asyncio.gather(*(_reach(client, node_id) for node_id, _ in brokers))
    for (node_id, broker), trouble in zip(brokers, troubles, strict=True):
        advertised = [each.advertised(node_id) for each in listeners]
        report.brokers.append(BrokerCheck(node_id, (broker.host, broker.port), advertised, trouble))
        if trouble is not None:
            report.problems.append(f"broker {node_id} cannot be reached: {trouble}")
        for each in listeners:
            if (no_address := each.trouble_of(node_id)) is not None:
                report.problems.append(f"broker {node_id} has no address at {each.name}: {no_address}")
    admin = (config.admin.host, config.admin.port) if config.admin.port else None
    report.problems += [f"[listener] {line}" for line in shared_ports(listeners, metadata.brokers, admin)]
    return not any(troubles)


def _check_ports(config: TidegateConfig, file: Path | None, report: Report) -> None:
    report.problems += advertised_problems(config.listener)
    if file is not None and is_in_use(file):
        report.ports = "not tried, because a process serves by these settings now"
    else:
        report.problems += taken_ports(config, [broker.node_id for broker in report.brokers])


def _check_certificates(config: TidegateConfig, report: Report) -> None:
    """Compares the certificates of the listeners with the advertised hosts of the brokers, and with the time."""
    for number, listener in enumerate(config.listener):
        if listener.tls is None:
            continue
        hosts = {broker.advertised[number][0] for broker in report.brokers}
        try:
            problems, warnings = certificate_findings(listener.tls, hosts, datetime.now(UTC))
        except (OSError, ValueError):
            continue  # the file cannot be used, which another line reports
        report.problems += [f"[listener.tls] {problem}" for problem in problems]
        report.warnings += [f"[listener.tls] {warning}" for warning in warnings]


async def _has_rights(config: TidegateConfig, client: BrokerClient, report: Report) -> bool:
    try:
        essential, others = await missing_permissions(client, config, TIMEOUT_MS)
    except BrokerError as error:
        report.problems.append(f"the proxy's own rights cannot be read: {error}")
        return False
    report.problems += [f"{principal_of(config)} lacks {right}" for right in (*essential, *others)]
    return not essential and not others


async def _reach(client: BrokerClient, node_id: int) -> str | None:
    try:
        await client.request_raw(node_id, MetadataRequest(topics=[]), TIMEOUT_MS, min_version=1)
    except BrokerError as error:
        return str(error)
    return None


async def _check_store(config: TidegateConfig, report: Report) -> bool:
    """Returns whether there is a store, and it works."""
    if config.storage is None:
        return False
    found = await check_store(config.storage, report.cluster_id or "unknown", TIMEOUT_MS * 3)
    problems = [f"[storage] {problem}" for problem in found]
    report.problems += [each for each in problems if each not in report.problems]  # a mistake in the settings is there
    if not problems:
        report.store = config.storage.implementation
    return not problems


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def taken_ports(config: TidegateConfig, node_ids: Collection[int]) -> Iterator[str]:
    """Binds the ports that `tidegate serve` will bind, and yields those that it cannot bind, one line each."""
    for listener in config.listener:
        for what, port in _ports(listener_addresses(listener), node_ids):
            yield from _trouble(what, listener.host, port)
    if config.admin.port:
        yield from _trouble("[admin] port", config.admin.host, config.admin.port)


def _ports(addresses: ListenerAddresses, node_ids: Collection[int]) -> Iterator[tuple[str, int]]:
    yield BOOTSTRAP_PORT, addresses.bootstrap_port
    if addresses.base_port is not None:
        for node_id in sorted(node_ids):
            if addresses.trouble_of(node_id) is None:
                yield f"[listener] base.port: broker {node_id}", addresses.base_port + node_id


def _trouble(what: str, host: str, port: int) -> Iterator[str]:
    try:
        bind(host, port, reuse_port=False, listens=False).close()
    except OSError as error:
        yield f"{what}: {error.strerror or error}: free the port, or change the setting"


def advertised_problems(listeners: Sequence[ListenerConfig]) -> Iterator[str]:
    """Yields a line for each listener that sends the clients of other machines to themselves."""
    for listener in listeners:
        if "advertised_host" not in listener.model_fields_set and not is_loopback(listener.host):
            yield (
                f"[listener] {listener.name}: there is no advertised.host, so clients are told to connect to"
                f" {listener.advertised_host}: set it to the name of this machine, or to localhost if all clients run"
                " here"
            )


async def metadata_topic_trouble(
    config: TidegateConfig, client: BrokerClient, cluster_id: str, timeout_ms: int, *, has_store: bool
) -> str | None:
    """Returns why the metadata topic is lost, or must not be used. None: it is in order, or `serve` may create it.

    Compares the topic with the saved state in `state.path`, and with the store if the topic has no record and the store
    answers (`has_store`). Creates nothing."""

    async def refusal_to_create() -> str | None:
        if not has_store:
            return None  # the report has the store's problem
        try:
            async with open_storage(config, cluster_id) as storage:
                return await segments_without_metadata(config, storage_cluster_id(config, cluster_id), storage)
        except (RemoteTierError, RemoteStorageError) as error:
            return f"topic {config.remote_log.metadata_topic} has no record, and the store cannot be listed: {error}"

    try:
        saved = await asyncio.to_thread(saved_identity, config.state.path / METADATA_FOLDER)
        topic = config.remote_log.metadata_topic_settings
        await find_metadata_topic(client, topic, timeout_ms, saved, refusal_to_create)
    except RemoteLogError as error:
        return str(error)
    return None
