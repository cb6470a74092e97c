"""How each command of the documents is tested, page by page.

A command belongs to the longest beginning of its page that fits. Its value is a test, which runs the command itself, or
begins with `NOT_RUN` and gives the reason. tests/test_documented_commands.py parses all of them, and fails if a command
has no entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.support.documents import shell_commands
from tests.support.repository import ROOT

TRANSCRIPT: Final = "tests/system/test_tutorial.py"
"""Runs the commands of a page in their order, on real servers."""
NOT_RUN: Final = "not run: "
INSTALLATION: Final = "tests/test_installation.py"
JOBS: Final = "tests/pipeline/test_documented_jobs.py"
"""Runs the commands of the pipeline's page in their order, on real servers and Spark."""
OF_MAKE: Final = f"{NOT_RUN}takes minutes to hours; make shows what it would run"
DOWNLOADS: Final = f"{NOT_RUN}downloads packages; make runs pip with the same options, from requirements-dev.txt"
DOCKER: Final = f"{NOT_RUN}needs a Docker daemon; tests/test_compose.py looks up everything that Docker reads"
CLUSTER: Final = f"{NOT_RUN}needs a cluster of Spark; tests/pipeline/test_spark_submit.py submits to a standalone one"
KUBERNETES: Final = (
    f"{NOT_RUN}needs a cluster of Kubernetes; tests/test_deployment.py renders the manifests and loads their settings"
)
SYSTEMD: Final = f"{NOT_RUN}changes the machine; tests/test_deployment.py checks the unit and its environment"
MEASURES: Final = f"{NOT_RUN}measures for minutes"

ALTER: Final = "kafka-configs.sh --bootstrap-server tidegate.example.org:9092 --alter --topic orders-eu --add-config"

HOW: Final[Mapping[str, Mapping[str, str]]] = {
    "README.md": {
        "make demo": "tests/integration/test_demo.py",
        "make test": OF_MAKE,
        "python3 -m venv .venv": INSTALLATION,
        ".venv/bin/pip install --require-hashes": DOWNLOADS,
        ".venv/bin/pip install --no-deps --no-build-isolation .": INSTALLATION,
        ".venv/bin/tidegate check": TRANSCRIPT,
        ".venv/bin/tidegate serve": TRANSCRIPT,
        ".venv/bin/tidegate tier bounds": TRANSCRIPT,
        ".venv/bin/tidegate explain": TRANSCRIPT,
        ".venv/bin/tidegate top": TRANSCRIPT,
        "kafka-configs.sh": TRANSCRIPT,
    },
    "docs/start.md": {
        "make demo": "tests/integration/test_demo.py",
        "python3 -m venv .venv": INSTALLATION,
        ".venv/bin/pip install --require-hashes": DOWNLOADS,
        ".venv/bin/pip install --no-deps --no-build-isolation .": INSTALLATION,
        "mkdir try-tier": TRANSCRIPT,
        ".venv/bin/tidegate check": TRANSCRIPT,
        ".venv/bin/tidegate serve": TRANSCRIPT,
        ".venv/bin/tidegate tier bounds": TRANSCRIPT,
        "kafka-topics.sh": TRANSCRIPT,
        "kafka-producer-perf-test.sh": TRANSCRIPT,
        "kafka-get-offsets.sh": TRANSCRIPT,
        "kafka-console-consumer.sh": TRANSCRIPT,
        "kafka-consumer-groups.sh": TRANSCRIPT,
        "rm -r try-tier": TRANSCRIPT,
    },
    "docs/first-start.md": {
        "kafka-acls.sh": "tests/integration/test_documented_rights.py",
        "useradd": SYSTEMD,
        "python3 -m venv /opt/tidegate": SYSTEMD,
        "/opt/tidegate/bin/pip install": DOWNLOADS,
        "install -": SYSTEMD,
        "systemctl": SYSTEMD,
        "systemd-run": SYSTEMD,
    },
    "docs/day-to-day.md": {
        "curl -X POST": "tests/unit/proxy/test_admin_access.py",
        "make alerts": "tests/test_alert_rules.py",
        "git pull": f"{NOT_RUN}needs the repository from which the reader cloned",
        "/opt/tidegate/bin/pip install": DOWNLOADS,
        "systemctl": SYSTEMD,
        f"{ALTER} remote.log.retention.minutes": TRANSCRIPT,
        f"{ALTER} remote.storage.enable=true,remote.log.copy.disable": "tests/system/test_topic_configs.py",
        f"{ALTER} remote.storage.enable=false": "tests/system/test_topic_configs.py",
        "kafka-configs.sh --bootstrap-server tidegate.example.org:9092 --describe": TRANSCRIPT,
        "tidegate tier topics": TRANSCRIPT,
        "tidegate tier segments orders-eu": TRANSCRIPT,
        "tidegate tier pause orders-eu": TRANSCRIPT,
        "tidegate tier resume orders-eu": TRANSCRIPT,
        "tidegate tier verify --resume": "tests/system/test_tier_commands.py",
    },
    "docs/recovery.md": {
        "tidegate tier delete-missing": "tests/integration/test_topic_lifecycle.py",
    },
    "docs/kubernetes.md": {
        "docker": DOCKER,
        "kubectl": KUBERNETES,
        "helm": KUBERNETES,
    },
    "docs/pipeline.md": {
        ".venv/bin/pip install": DOWNLOADS,
        ".venv/bin/tidegate-pipeline warm": "tests/pipeline/decode/test_kernel_cache.py",
        "tidegate-pipeline sql": JOBS,
        "tidegate-pipeline offload": JOBS,
        "tidegate-pipeline offload --config tidegate.toml --interval": "tests/pipeline/test_offload_in_spark.py",
        "tidegate-pipeline export": JOBS,
        "tidegate-pipeline scrub": JOBS,
        "tidegate-pipeline usage": JOBS,
        "tidegate-pipeline rebuild": JOBS,
        "tidegate-pipeline merge": JOBS,
        "tidegate-pipeline retain": JOBS,
        "PYSPARK_PYTHON=/opt/python/bin/python3 spark-submit": "tests/pipeline/test_spark_submit.py",
        "python -m venv env": CLUSTER,
        "env/bin/": CLUSTER,
        "PYSPARK_PYTHON=./env/bin/python spark-submit --master yarn": CLUSTER,
        "spark-submit --master k8s": CLUSTER,
    },
    "CONTRIBUTING.md": {
        "make ": OF_MAKE,
        "git tag": "tests/test_release.py",
        "make release": "tests/test_release.py",
    },
    "bench/README.md": {
        "make bench": MEASURES,
        ".venv/bin/python -m bench.": MEASURES,
        "python -m bench.": MEASURES,
    },
}


def how(page: str, command: str) -> tuple[str, str]:
    """Returns the beginning that fits and how the command is tested. Raises `KeyError` if no beginning fits."""
    fitting = [beginning for beginning in HOW.get(page, {}) if command.startswith(beginning)]
    if not fitting:
        raise KeyError(f"{page}: {command}: tests/support/documented_commands.py does not say how this is tested")
    beginning = max(fitting, key=len)
    return beginning, HOW[page][beginning]


def commands_of(page: str, test: str) -> list[str]:
    """Returns the commands of a page that the test runs, in their order."""
    return [command for command in shell_commands(ROOT / page) if how(page, command)[1] == test]
