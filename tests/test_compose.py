"""`docker-compose.yml` cannot run here, so a test looks up everything that it names."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import load_config
from tests.support import command_lines
from tests.support.servers.jars import pom_property
from tests.support.servers.kafka import POM
from tests.support.servers.versitygw import VERSION as VERSITYGW_VERSION

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMMANDS = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
TIDEGATE = SERVICES["tidegate"]
SETTINGS = ROOT / "docs/compose/tidegate.toml"

SERVICE_KEYS = {
    "image", "build", "command", "entrypoint", "environment", "volumes", "ports", "healthcheck", "depends_on",
    "stop_grace_period", "configs", "profiles",
}  # fmt: skip
PROFILES = {"monitoring": {"prometheus", "grafana"}, "spark": {"spark"}}
CORE = {"kafka", "s3", "tidegate"}
"""What runs without a profile."""
VARIABLE = "${TIDEGATE_TAG:-"
HEALTHCHECK_KEYS = {"test", "interval", "timeout", "retries", "start_period"}
DURATION = re.compile(r"\d+(ms|s|m)")


def published_ports(service: dict[str, Any]) -> set[int]:
    """Ports inside the container that are reachable from outside under the same number."""
    ports: set[int] = set()
    for line in service.get("ports", []):
        host, container = line.rsplit(":", 2)[-2:]
        assert host == container, f"{line}: clients are sent to the port that the proxy itself listens on"
        first, _, last = container.partition("-")
        ports |= set(range(int(first), int(last or first) + 1))
    return ports


def test_services_use_only_keys_that_compose_knows() -> None:
    assert set(COMPOSE) <= {"name", "services", "volumes", "configs"}
    assert set(SERVICES) == CORE.union(*PROFILES.values())
    for service in SERVICES.values():
        assert set(service) <= SERVICE_KEYS


def test_the_admin_token_is_where_the_settings_look_for_it() -> None:
    token_file = load_config(SETTINGS).admin.token_file
    (mounted,) = [each for each in TIDEGATE["configs"] if each["target"] == str(token_file)]
    assert COMPOSE["configs"][mounted["source"]]["content"]


def test_a_profile_adds_services_to_the_core() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == CORE
    for profile, names in PROFILES.items():
        assert {name for name, service in SERVICES.items() if profile in service.get("profiles", ())} == names
    for service in SERVICES.values():
        (profile,) = service.get("profiles", [""])
        assert set(service.get("depends_on", ())) <= CORE | PROFILES.get(profile, set())


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    tag = SERVICES[name]["image"].removesuffix("}").rpartition(":")[2].removeprefix("-")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)


def test_one_variable_has_the_tag_of_our_images() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    built = {name: service["image"] for name, service in SERVICES.items() if "build" in service}
    assert set(built) == {"tidegate", "spark"}
    assert {image.partition(":")[2] for image in built.values()} == {f"{VARIABLE}{version}}}"}


def test_build_arguments_are_those_of_the_image_and_the_extras_exist() -> None:
    declared = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    arguments = SERVICES["spark"]["build"]["args"]
    assert set(arguments) == declared == {"EXTRAS", "PACKAGES"}
    assert set(arguments["EXTRAS"].split(",")) <= set(extras)


def test_the_monitoring_profile_mounts_what_its_programs_read() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    assert scrape["rule_files"] == ["tidegate-alerts.yaml"]
    assert (ROOT / "deploy/prometheus/tidegate-alerts.yaml").is_file()
    (job,) = scrape["scrape_configs"]
    assert job["job_name"] == "tidegate"
    assert job["static_configs"][0]["targets"] == [f"tidegate:{load_config(SETTINGS).admin.port}"]
    assert job["authorization"]["credentials_file"] == str(load_config(SETTINGS).admin.token_file)
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tidegate.yaml").read_text())[
        "providers"
    ]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/tidegate.json" in mounted


def test_images_are_the_versions_that_the_tests_run_on() -> None:
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{pom_property(POM, 'kafka.version')}"
    assert SERVICES["s3"]["image"] == f"versity/versitygw:{VERSITYGW_VERSION}"


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - {"spark"}))  # a job
def test_every_service_has_a_health_check(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert set(check) <= HEALTHCHECK_KEYS
    assert check["test"][0] == "CMD"
    assert all(DURATION.fullmatch(check[key]) for key in ("interval", "timeout", "start_period") if key in check)


def test_tidegate_waits_until_what_it_needs_is_healthy() -> None:
    assert TIDEGATE["depends_on"] == {name: {"condition": "service_healthy"} for name in ("kafka", "s3")}


def test_every_volume_is_a_path_of_ours_or_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]


def test_the_image_copies_only_what_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in kept


def test_every_base_image_is_pinned() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)


@pytest.mark.parametrize(
    "arguments",
    [
        TIDEGATE["command"],
        *[yaml.safe_load(found) for found in re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)],
    ],
)
def test_the_command_and_its_options_exist(arguments: list[str]) -> None:
    command_lines.tidegate(arguments)


def test_the_command_reads_the_settings_that_are_mounted() -> None:
    path = TIDEGATE["command"][TIDEGATE["command"].index("--config") + 1]
    assert f"./docs/compose/tidegate.toml:{path}:ro" in TIDEGATE["volumes"]


def test_the_s3_server_is_started_with_what_the_tests_start_it_with() -> None:
    assert SERVICES["s3"]["entrypoint"] == ["/bin/sh", "-c"]
    words = shlex.split(SERVICES["s3"]["command"][0])
    assert words[: words.index("&&")] == ["mkdir", "-p", "/data/tidegate", "/iam"]
    assert words[words.index("versitygw") :][-2:] == ["posix", "/data"]


def test_settings_load() -> None:
    load_config(SETTINGS)


def test_settings_fit_the_other_services() -> None:
    text = SETTINGS.read_text()
    settings = tomllib.loads(text)
    assert settings
    assert SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].removeprefix("PLAINTEXT://") in text
    for secret in SERVICES["s3"]["environment"].values():
        assert f'"{secret}"' in text
