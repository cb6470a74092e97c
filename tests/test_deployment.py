"""The files in `deploy/` for systemd, Kubernetes and Helm: what they name exists, and what they set is valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import yaml

from proxy.config import TidegateConfig, load_config
from tests.support.command_lines import parse
from tests.support.repository import ROOT
from tests.support.tools import programs
from tiers.commands.console import CONFIG_VARIABLE

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "systemd/tidegate.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CHART = DEPLOY / "helm/tidegate"
VALUES = DEPLOY / "helm/values"
TEST_OF_PODS = CHART / "files/pods_are_ready.py"
CASES = {
    "s3-keys": ["s3-keys"],
    "s3-role": ["s3-role"],
    "file-system": ["file-system"],
    "load-balancer": ["s3-keys", "load-balancer"],
    "sni": ["sni"],
}
"""The documented cases, and the files of values of each."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SECRETS = "/etc/tidegate/secrets"
GRACE_S = 60
"""A proxy may take a minute longer than its drain."""

Manifests = list[dict[str, Any]]


def plain_manifests() -> Manifests:
    """The manifests, and the example of the Secret, whose name keeps `kubectl apply` from taking it."""
    folder = DEPLOY / "kubernetes"
    paths = [*sorted(folder.glob("*.yaml")), folder / "secret.yaml.example"]
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


def one_of(manifests: Manifests, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [one for one in manifests if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    return found


def settings_of(manifests: Manifests, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TidegateConfig:
    """Loads the settings as a pod has them: the file of the ConfigMap, the environment, and the files of the Secret."""
    (container,) = one_of(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    for name in ("admin-token", "store-key-id", "store-key"):
        (folder / name).write_text("a-secret-of-the-test\n")
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"].replace(SECRETS, str(folder)))
    (text,) = one_of(manifests, "ConfigMap")["data"].values()
    path = folder / "tidegate.toml"
    path.write_text(text.replace(SECRETS, str(folder)))
    return load_config(path)


def check_manifests(manifests: Manifests, config: TidegateConfig) -> None:
    """Checks what the manifests of a proxy have in common, plain or from the chart."""
    assert {one["kind"] for one in manifests} >= {"ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget"}
    stateful = one_of(manifests, "StatefulSet")
    spec, pod = stateful["spec"], stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    labels = spec["template"]["metadata"]["labels"].items()
    services = [one for one in manifests if one["kind"] == "Service"]
    budget = one_of(manifests, "PodDisruptionBudget")
    for selector in (
        spec["selector"]["matchLabels"],
        budget["spec"]["selector"]["matchLabels"],
        *(service["spec"]["selector"] for service in services),
    ):
        assert selector.items() <= labels
    assert budget["spec"]["maxUnavailable"] == 1 < spec["replicas"]

    headless = one_of(manifests, "Service", spec["serviceName"])
    assert headless["spec"]["clusterIP"] == "None"
    assert [port["port"] for port in headless["spec"]["ports"]] == [config.admin.port]
    (clients,) = [service for service in services if service is not headless]
    ports = [port["port"] for port in clients["spec"]["ports"]]
    [listener] = config.listener
    assert ports[0] == listener.bootstrap_port
    assert ports[1:] == [listener.base_port + int(port["name"][7:]) for port in clients["spec"]["ports"][1:]]
    assert all(port["port"] == port["targetPort"] for service in services for port in service["spec"]["ports"])
    assert sorted(port["containerPort"] for port in container["ports"]) == sorted([*ports, config.admin.port])
    if clients["spec"].get("type", "ClusterIP") == "ClusterIP":
        namespace = clients["metadata"].get("namespace", "default")
        assert listener.advertised_host == f"{clients['metadata']['name']}.{namespace}.svc.cluster.local"
    else:
        assert listener.advertised_host.endswith("kafka.example.org")
    assert (listener.brokers_by == "sni") == (len(ports) == 1)

    parse("tidegate", container["args"])
    (file,) = [each["value"] for each in container["env"] if each["name"] == CONFIG_VARIABLE]
    assert file == container["args"][-1]
    assert container["image"].rpartition("/")[2] == f"tidegate:{VERSION}"
    assert pod["securityContext"]["runAsUser"] == int(re.findall(r"--uid (\d+)", DOCKERFILE)[0])
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    inner = container["securityContext"]
    assert (inner["readOnlyRootFilesystem"], inner["allowPrivilegeEscalation"]) == (True, False)
    assert inner["capabilities"] == {"drop": ["ALL"]}
    sleep, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(pause_s) + config.limits.drain_timeout_ms / 1000 + GRACE_S
    for constraint in pod["topologySpreadConstraints"]:
        assert constraint["labelSelector"]["matchLabels"].items() <= labels
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"]
    for name, path in (("livenessProbe", "/livez"), ("readinessProbe", "/servez")):
        assert {"scheme": "HTTP", **container[name]["httpGet"]} == {"scheme": "HTTP", "path": path, "port": "admin"}

    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {each["name"] for each in (*pod["volumes"], *(one["metadata"] for one in spec["volumeClaimTemplates"]))}
    assert set(mounts) == volumes
    assert str(config.state.path).startswith(mounts["state"]["mountPath"])
    assert mounts["secrets"]["mountPath"] == SECRETS
    assert config.admin.host == "0.0.0.0"
    assert config.admin.token_file is not None
    assert config.storage is not None


def test_the_plain_manifests_fit_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = plain_manifests()
    check_manifests(manifests, settings_of(manifests, tmp_path, monkeypatch))
    secret = one_of(manifests, "Secret")
    (container,) = one_of(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    in_secret = [each["value"] for each in container["env"] if each["value"].startswith(SECRETS)]
    named = {value.removeprefix(f"{SECRETS}/") for value in in_secret} | {"admin-token"}
    assert secret["stringData"].keys() == named
    assert all(one["apiVersion"] and one["metadata"]["labels"] for one in manifests)


def test_the_versions_are_those_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def rendered(*options: str) -> Manifests:
    text = programs.run("helm", "template", "tidegate", str(CHART), "--namespace", "default", *options)
    return [one for one in yaml.safe_load_all(text) if one]


@pytest.mark.full
def test_helm_accepts_the_chart() -> None:
    programs.run("helm", "lint", "--strict", str(CHART))


@pytest.mark.full
def test_the_chart_renders_manifests_that_fit_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = rendered()
    check_manifests(manifests, settings_of(manifests, tmp_path, monkeypatch))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_documented_values_fit_the_settings(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [word for name in CASES[case] for word in ("-f", str(VALUES / f"{name}.yaml"))]
    programs.run("helm", "lint", "--strict", str(CHART), *options)
    manifests = rendered(*options)
    config = settings_of(manifests, tmp_path, monkeypatch)
    check_manifests(manifests, config)
    assert config.storage is not None
    has_keys = any(key.startswith("secret.access.key") for key in config.storage.settings)
    assert has_keys == (case in ("s3-keys", "load-balancer"))


def test_prometheus_finds_the_pods() -> None:
    """The rest of the file is as in deploy/prometheus/prometheus.yaml, which promtool checks."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus-kubernetes.yaml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    pods = one_of(plain_manifests(), "Service", "tidegate-pods")
    assert found["names"] == [f"{pods['metadata']['name']}.default.svc.cluster.local"]
    assert found["port"] == pods["spec"]["ports"][0]["port"]
    assert pods["spec"]["publishNotReadyAddresses"]
    assert job["authorization"]["credentials_file"] == f"{SECRETS}/admin-token"


def test_the_cases_use_all_files_of_values() -> None:
    used = {name for names in CASES.values() for name in names}
    assert used == {path.stem for path in VALUES.glob("*.yaml")}
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert [name for name in used if f"deploy/helm/values/{name}.yaml" not in page] == []


@pytest.mark.full
def test_values_change_the_ports_of_all_manifests_together() -> None:
    values = (
        "listener.basePort=19000,listener.brokerIds={4,7},admin.port=9999,listener.advertisedHost=kafka.example.org"
    )
    manifests = rendered("--set", values)
    clients = one_of(manifests, "Service", "tidegate")
    assert [port["port"] for port in clients["spec"]["ports"]] == [9092, 19004, 19007]
    (container,) = one_of(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert "TIDEGATE__WORKERS" not in environment
    assert environment["TIDEGATE__LISTENER__ADVERTISED_HOST"] == "kafka.example.org"
    assert environment["TIDEGATE__ADMIN__PORT"] == "9999"


@pytest.mark.full
def test_the_chart_has_the_alerts_with_links_to_the_runbook() -> None:
    values = "alerts.enabled=true,alerts.runbookUrl=https://example.org/runbook/,alerts.labels.release=p"
    rule = one_of(rendered("--set", values), "PrometheusRule")
    plain = (DEPLOY / "prometheus/tidegate-alerts.yaml").read_text()
    linked = plain.replace("runbook_url: docs/runbook/", "runbook_url: https://example.org/runbook/")
    assert rule["spec"] == yaml.safe_load(linked)
    assert rule["metadata"]["labels"]["release"] == "p"
    with pytest.raises(AssertionError, match=r"alerts\.runbookUrl is missing"):
        rendered("--set", "alerts.enabled=true")


@pytest.mark.full
def test_a_monitor_reads_all_pods_as_the_alerts_want_it() -> None:
    values = "podMonitor.enabled=true,podMonitor.cluster=orders,podMonitor.labels.release=p,workers=3"
    manifests = rendered("--set", values)
    monitor, template = one_of(manifests, "PodMonitor"), one_of(manifests, "StatefulSet")["spec"]["template"]
    spec, labels = monitor["spec"], template["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert labels[spec["jobLabel"]] == "tidegate"  # as in deploy/prometheus/prometheus.yaml
    (endpoint,) = spec["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "tidegate", "key": "admin-token"}
    assert {"targetLabel": "cluster", "replacement": "orders"} in endpoint["relabelings"]
    assert monitor["metadata"]["labels"]["release"] == "p"
    assert {"name": "TIDEGATE__WORKERS", "value": "3"} in container["env"]
    assert endpoint["scheme"] == "http"


@pytest.mark.full
def test_what_reads_the_admin_port_speaks_tls_if_the_port_does(tmp_path: Path) -> None:
    """Kubernetes does not verify the certificate. Prometheus does, as the values say."""
    authority = {"ca": {"configMap": {"name": "authorities", "key": "ca.pem"}}, "serverName": "tidegate"}
    settings = '[admin.tls]\ncertificate = "/etc/tidegate/secrets/admin.pem"\n'
    file = tmp_path / "values.yaml"
    monitor = {"enabled": True, "tlsConfig": authority}
    file.write_text(yaml.safe_dump({"settings": settings, "podMonitor": monitor}))
    manifests = rendered("-f", str(file))
    (container,) = one_of(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{each}Probe"]["httpGet"]["scheme"] for each in ("startup", "liveness", "readiness")]
    assert probes == ["HTTPS"] * 3
    (endpoint,) = one_of(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", authority)
    assert one_of(manifests, "Pod")["spec"]["containers"][0]["command"][3] == "https"


@pytest.mark.full
def test_a_network_policy_has_the_ports_and_the_peers(tmp_path: Path) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    egress = [{"ports": [{"port": 9092}]}]
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"networkPolicy": {"enabled": True, "admin": peers, "egress": egress}}))
    manifests = rendered("-f", str(file))
    spec, test_pod = one_of(manifests, "NetworkPolicy")["spec"], one_of(manifests, "Pod")
    pods = one_of(manifests, "StatefulSet")["spec"]["template"]
    assert spec["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == egress
    clients, admin = spec["ingress"]
    assert "from" not in clients
    (container,) = pods["spec"]["containers"]
    assert [each["port"] for each in clients["ports"] + admin["ports"]] == [each["name"] for each in container["ports"]]
    assert admin["from"] == [{"podSelector": {"matchLabels": test_pod["metadata"]["labels"]}}, *peers]


@pytest.mark.full
def test_the_pod_of_helm_test_is_no_proxy_to_a_service() -> None:
    manifests = rendered()
    pod = one_of(manifests, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    for service in (one for one in manifests if one["kind"] == "Service"):
        assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    headless = one_of(manifests, "StatefulSet")["spec"]["serviceName"]
    assert container["command"][:2] == ["python", "-c"]
    assert container["command"][2].strip() == TEST_OF_PODS.read_text().strip()
    assert container["command"][3:] == ["http", headless, "9190", "2"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("replicas=two", "at '/replicas': got string, want integer"),
        ("replica=3", "additional properties 'replica' not allowed"),
        ("service.type=Ingress", "at '/service/type': value must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'"),
        ("listener.basePort=70000", "at '/listener/basePort': maximum"),
        ("secretSettings.store-key=key", "at '/secretSettings': additional properties 'store-key' not allowed"),
        ("state.size=20GB", "at '/state/size': '20GB' does not match"),
        ("topologySpreadConstraints[0].maxSkew=1", "at '/topologySpreadConstraints/0': missing properties"),
    ],
)
def test_a_wrong_value_is_named(value: str, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        rendered("--set", value)


def test_the_schema_has_each_value_and_no_other() -> None:
    def names(schema: dict[str, Any]) -> dict[str, Any]:
        return {name: names(each) for name, each in schema.get("properties", {}).items()}

    def named(values: Any) -> dict[str, Any]:
        return {name: named(each) for name, each in values.items()} if isinstance(values, dict) else {}

    values = named(yaml.safe_load((CHART / "values.yaml").read_text()))
    schema = names(json.loads((CHART / "values.schema.json").read_text()))
    assert schema.pop("global") == {}  # of Helm itself
    free: dict[str, Any] = {name: {} for name in ("env", "resources")}
    assert {**values, **free} == {**schema, "topologySpreadConstraints": {}}


class _Ready(BaseHTTPRequestHandler):
    answers: ClassVar[list[tuple[int, bytes]]]

    def do_GET(self) -> None:
        status, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text if self.path == "/readyz" else b"")

    def log_message(self, *_: object) -> None:
        """The output of the test has no lines of the server."""


@contextmanager
def pod_that_answers(*answers: tuple[int, bytes]) -> Iterator[int]:
    handler = type("Handler", (_Ready,), {"answers": list(answers)})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def helm_test(port: int, pods: int, within_s: int) -> subprocess.CompletedProcess[str]:
    script = TEST_OF_PODS.read_text().replace("WITHIN_S = 60", f"WITHIN_S = {within_s}")
    command = [sys.executable, "-c", script, "http", "127.0.0.1", str(port), str(pods)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_helm_test_waits_until_the_pods_are_ready() -> None:
    with pod_that_answers((503, b"starting"), (200, b"ready")) as port:
        done = helm_test(port, 1, within_s=60)
    assert (done.returncode, done.stdout) == (0, "1 pods are ready\n")


def test_helm_test_says_which_pod_is_not_ready() -> None:
    with pod_that_answers((503, b"worker-1: state: INITIALIZING\n")) as port:
        done = helm_test(port, 2, within_s=0)
    missing = "127.0.0.1: 1 of 2 pods have an address"
    assert (done.returncode, done.stderr) == (1, f"{missing}\n127.0.0.1: worker-1: state: INITIALIZING\n")


def test_the_chart_has_the_parts_of_the_plain_manifests() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*.yaml"))
    kinds = {one["kind"] for one in plain_manifests()} - {"Secret"}
    more = {"NetworkPolicy", "Pod", "PodMonitor", "PrometheusRule"}
    assert set(re.findall(r"^kind: (\w+)$", templates, re.MULTILINE)) == kinds | more
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(r"\.Values\.([\w.]+)", templates):
        found: Any = values
        for part in path.split("."):
            assert part in found, path
            found = found[part]


def lines_of(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)


def test_the_unit_starts_a_command_that_exists() -> None:
    (start,) = lines_of(UNIT, "ExecStart")
    program, *arguments = shlex.split(start)
    assert Path(program).name == "tidegate"
    parse("tidegate", arguments)


def test_the_unit_waits_for_the_drain_and_has_open_files() -> None:
    limits = TidegateConfig.section_models()["limits"]()
    (stop_s,) = lines_of(UNIT, "TimeoutStopSec")
    (files,) = lines_of(UNIT, "LimitNOFILE")
    assert int(stop_s) >= limits.drain_timeout_ms / 1000 + GRACE_S  # type: ignore[attr-defined]
    assert int(files) >= 2 * limits.max_connections + 1000  # type: ignore[attr-defined]
    assert lines_of(UNIT, "Restart") == ["on-failure"]


@pytest.mark.parametrize("with_secrets", [False, True])
def test_the_environment_of_the_unit_is_valid(
    with_secrets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As delivered, it fits a cluster without SASL and a store without keys."""
    example = (DEPLOY / "systemd/tidegate.env.example").read_text()
    assert "\n#TIDEGATE__" in example
    if with_secrets:
        example = example.replace("\n#TIDEGATE__", "\nTIDEGATE__")
    for line in example.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("=", 1)
            if name.endswith("_FILE"):
                (tmp_path / Path(value).name).write_text("a-secret-of-the-test\n")
                value = value.replace("/etc/tidegate", str(tmp_path))
            monkeypatch.setenv(name, value)
    path = tmp_path / "tidegate.toml"
    sasl = '[upstream.sasl]\nmechanism = "PLAIN"\nusername = "tidegate"'
    path.write_text(
        f"""
[upstream]
bootstrap.servers = "kafka-1:9092"
{sasl if with_secrets else ""}
[listener]
advertised.host = "tidegate.example.org"
[storage]
implementation = "s3"
bucket = "my-log-segments"
[[topics]]
pattern = "orders-*"
"""
    )
    config = load_config(path)
    (folder,) = lines_of(UNIT, "StateDirectory")
    assert config.state.path == Path("/var/lib", folder)
    assert (config.upstream.sasl is not None) == with_secrets


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """A machine without systemd has nothing to ask: then the unit's keys are compared with a list."""
    unit = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE)
    unit = re.sub(r"^(User|Group)=.*$", r"\1=root", unit, flags=re.MULTILINE)
    path = tmp_path / "tidegate.service"
    path.write_text(unit)
    verifier = shutil.which("systemd-analyze")
    if verifier is not None:
        environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
        done = subprocess.run(
            [verifier, "verify", str(path)], capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    sections = re.findall(r"^\[(\w+)\]$", UNIT, re.MULTILINE)
    assert sections == ["Unit", "Service", "Install"]
    assert all(re.fullmatch(r"[A-Z]\w+=.*|#.*|\[\w+\]|", line) for line in UNIT.splitlines())
