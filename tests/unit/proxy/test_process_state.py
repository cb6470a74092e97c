"""The state of a process: one time series per state, of which one is 1."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from proxy.admin.facts import THIS_PROCESS, ProcessState, RaisedAlarm
from proxy.process.admin.process_state import metrics_of_the_dead, register_state
from tests.support.proxy.one_worker import one_worker
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.ports import free_ports
from tiers.errors import BrokerRefusedError


def states(text: str) -> dict[str, float]:
    (family,) = text_string_to_metric_families(text)
    return {sample.labels["state"]: sample.value for sample in family.samples}


@pytest.mark.parametrize("state", ProcessState)
def test_one_state_is_present(state: ProcessState) -> None:
    registry = CollectorRegistry()
    register_state(registry, lambda: state)
    found = {each.value: registry.get_sample_value("tidegate_process_state", {"state": each}) for each in ProcessState}
    assert found == {each.value: float(each is state) for each in ProcessState}


def test_a_process_that_died_has_failed() -> None:
    assert states(metrics_of_the_dead()) == {"INITIALIZING": 0, "SERVING": 0, "DRAINING": 0, "FAILED": 1}


async def test_a_proxy_tells_its_state() -> None:
    port, admin = free_ports(2)
    text = (
        f'[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[listener]\nbootstrap.port = {port}\n[admin]\nport = {admin}'
    )
    stack = AsyncExitStack()
    proxy = one_worker(parse_config(text), stack)
    found, served = [proxy.state], [not proxy.not_serving()]
    proxy.topology.refusal = BrokerRefusedError("wrong password")
    found.append(proxy.state)
    served.append(not proxy.not_serving())
    raised = proxy.view.alarms.raised()
    proxy.topology._first_read.set()
    served.append(not proxy.not_serving())  # the clients have logins of their own
    proxy.topology.refusal = None
    found.append(proxy.state)
    served.append(not proxy.not_serving())
    proxy.topology._answered_at_ms -= 15_000
    gone = [proxy.not_serving(), proxy.not_ready()]
    proxy.topology._answered_at_ms += 15_000
    proxy._stops = True
    found.append(proxy.state)
    served.append(not proxy.not_serving())
    await proxy.client.close()
    await stack.aclose()
    assert found == [ProcessState.INITIALIZING, ProcessState.FAILED, ProcessState.SERVING, ProcessState.DRAINING]
    assert served == [False, False, True, True, False]
    assert gone == 2 * [["no broker has answered for 15 s: no error so far"]]
    assert raised == [RaisedAlarm("proxy-rejected", THIS_PROCESS, "wrong password")]
    assert proxy.view.alarms.raised() == []
