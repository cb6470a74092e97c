"""The files in `deploy/` for systemd, Kubernetes and Helm: what they name exists, and what they set is valid."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import TidegateConfig, load_config
from tests.support import command_lines
from tests.support.repository import ROOT
from tests.support.tools import programs
from tiers.commands.console import CONFIG_VARIABLE

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "systemd/tidegate.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CHART = DEPLOY / "helm/tidegate"
VALUES = DEPLOY / "helm/values"
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

    command_lines.tidegate(container["args"])
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
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "admin"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/servez", "port": "admin"}

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


@pytest.mark.full
def test_helm_accepts_the_chart() -> None:
    programs.run("helm", "lint", "--strict", str(CHART))


@pytest.mark.full
def test_the_chart_renders_manifests_that_fit_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = programs.run("helm", "template", "tidegate", str(CHART), "--namespace", "default")
    manifests = [one for one in yaml.safe_load_all(rendered) if one]
    check_manifests(manifests, settings_of(manifests, tmp_path, monkeypatch))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_documented_values_fit_the_settings(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [word for name in CASES[case] for word in ("-f", str(VALUES / f"{name}.yaml"))]
    programs.run("helm", "lint", "--strict", str(CHART), *options)
    rendered = programs.run("helm", "template", "tidegate", str(CHART), "--namespace", "default", *options)
    manifests = [one for one in yaml.safe_load_all(rendered) if one]
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
    rendered = programs.run("helm", "template", "two", str(CHART), "--set", values)
    manifests = [one for one in yaml.safe_load_all(rendered) if one]
    clients = one_of(manifests, "Service", "two-tidegate")
    assert [port["port"] for port in clients["spec"]["ports"]] == [9092, 19004, 19007]
    (container,) = one_of(manifests, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["TIDEGATE__LISTENER__ADVERTISED_HOST"] == "kafka.example.org"
    assert environment["TIDEGATE__ADMIN__PORT"] == "9999"


@pytest.mark.full
def test_the_chart_has_the_alerts_with_links_to_the_runbook() -> None:
    command = ["helm", "template", "tidegate", str(CHART), "--set", "alerts.enabled=true"]
    rendered = programs.run(*command, "--set", "alerts.runbookUrl=https://example.org/runbook/,alerts.labels.release=p")
    rule = one_of([one for one in yaml.safe_load_all(rendered) if one], "PrometheusRule")
    plain = (DEPLOY / "prometheus/tidegate-alerts.yaml").read_text()
    linked = plain.replace("runbook_url: docs/runbook/", "runbook_url: https://example.org/runbook/")
    assert rule["spec"] == yaml.safe_load(linked)
    assert rule["metadata"]["labels"]["release"] == "p"
    with pytest.raises(AssertionError, match=r"alerts\.runbookUrl is missing"):
        programs.run(*command)


def test_the_chart_has_the_parts_of_the_plain_manifests() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").glob("*.yaml"))
    kinds = {one["kind"] for one in plain_manifests()} - {"Secret"}
    assert set(re.findall(r"^kind: (\w+)$", templates, re.MULTILINE)) == kinds | {"PrometheusRule"}
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
    command_lines.tidegate(arguments)


def test_a_reload_of_the_unit_sends_sighup() -> None:
    """Before the proxy has a handler, the signal ends it, and systemd takes that for a good end."""
    assert lines_of(UNIT, "ExecReload") == ["/bin/kill -HUP $MAINPID"]
    assert lines_of(UNIT, "RestartForceExitStatus") == ["SIGHUP"]


def test_the_unit_waits_for_reports_of_the_supervisor() -> None:
    """Brokers that are away for hours end no start: proxy/process/start/service_manager.py reports when it is ready."""
    assert lines_of(UNIT, "Type") == ["notify"]
    assert lines_of(UNIT, "NotifyAccess") == ["main"]
    assert lines_of(UNIT, "TimeoutStartSec") == ["infinity"]
    (watchdog_s,) = lines_of(UNIT, "WatchdogSec")
    assert int(watchdog_s) >= 30


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
