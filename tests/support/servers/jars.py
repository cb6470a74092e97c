"""Fetches jars with Maven: the jars of a pom go to one folder of `.cache`, once per machine.

A folder that exists is complete: it is filled under another name and then renamed. If Java or Maven is missing, an
error tells what to install.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache"
OLDEST_JAVA = 17


class ServerUnavailable(RuntimeError):
    """A real server cannot be started here. The message is one line: what to install, or where to look."""


def java() -> str:
    """Returns the `java` to run: `$JAVA_HOME/bin/java`, or the one on the path if that is not set."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if found is None:
        raise ServerUnavailable(f"Java is missing: install a JDK, {OLDEST_JAVA} or newer (openjdk-17-jdk-headless).")
    major = re.search(r'version "(\d+)', _version(found))
    if major is None or int(major[1]) < OLDEST_JAVA:
        raise ServerUnavailable(f"{found} is too old: install a JDK, {OLDEST_JAVA} or newer (openjdk-17-jdk-headless).")
    return found


@functools.cache
def _version(program: str) -> str:
    """Returns the output of `java -version`. Cached, because the call is slow."""
    return subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr


def class_archive(libs: Path) -> Path:
    """Returns the path of the class archive for this Java and these jars (JEP 350), which shortens the start.

    Java accepts only an archive of its own build and of the same jars at the same place. Therefore the name depends on
    all three."""
    of = f"{_version(java())} {libs} {libs.stat().st_mtime_ns}"
    return libs.with_name(f"classes-{hashlib.sha256(of.encode()).hexdigest()[:12]}.jsa")


def pom_property(pom: Path, name: str) -> str:
    """Returns a property of the pom, such as `kafka.version`."""
    found = ET.parse(pom).find(f".//{{*}}properties/{{*}}{name}")
    if found is None or found.text is None:
        raise ValueError(f"{pom} has no property {name}")
    return found.text


def jars(pom: Path, name: str, properties: Mapping[str, str] | None = None) -> Path:
    """Returns the folder `.cache/<name>/libs` with every jar that the pom names, and their dependencies."""
    libs = CACHE / name / "libs"
    if libs.is_dir():
        return libs
    if shutil.which("mvn") is None:
        raise ServerUnavailable("Maven is missing: install it (apt-get install maven), it fetches the Java servers.")
    libs.parent.mkdir(parents=True, exist_ok=True)
    with (libs.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if libs.is_dir():
            return libs
        partial = libs.with_name("libs.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={partial}"]
        command += [f"-D{key}={value}" for key, value in (properties or {}).items()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
            raise ServerUnavailable(f"Maven could not fetch the jars of {pom.name}: {last[0]}")
        partial.rename(libs)
    return libs
