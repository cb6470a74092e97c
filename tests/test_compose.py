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
from tests.support.command_lines import parse
from tests.support.servers.jars import pom_property
from tests.support.servers.kafka import POM
from tests.support.servers.versitygw import VERSION as VERSITYGW_VERSION

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
TIDEGATE = SERVICES["tidegate"]
SETTINGS = ROOT / "docs/compose/tidegate.toml"

VARIABLE = "${TIDEGATE_TAG:-"


def test_the_admin_token_is_where_the_settings_look_for_it() -> None:
    token_file = load_config(SETTINGS).admin.token_file
    (mounted,) = [each for each in TIDEGATE["configs"] if each["target"] == str(token_file)]
    assert COMPOSE["configs"][mounted["source"]]["content"]


def test_one_variable_has_the_tag_of_our_images() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    built = {name: service["image"] for name, service in SERVICES.items() if "build" in service}
    assert set(built) == {"tidegate", "spark"}
    assert {image.partition(":")[2] for image in built.values()} == {f"{VARIABLE}{version}}}"}


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


@pytest.mark.parametrize(
    "arguments",
    [
        TIDEGATE["command"],
        *[yaml.safe_load(found) for found in re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)],
    ],
)
def test_the_command_and_its_options_exist(arguments: list[str]) -> None:
    parse("tidegate", arguments)


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
