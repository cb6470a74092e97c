"""What `tidegate check` says about files of the settings, without a cluster."""

from __future__ import annotations

from pathlib import Path

from proxy.commands.check import check
from tests.support.proxy.parsed_config import parse_config


async def test_an_unusable_guard_of_the_admin_port_is_a_problem(tmp_path: Path) -> None:
    token = tmp_path / "token"
    settings = f'[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\ntoken.file = "{token}"\n'
    assert f"[admin] token.file: {token}: No such file or directory" in (await check(parse_config(settings))).problems
    token.write_text("secret")
    certificate = tmp_path / "admin.pem"
    settings += f'[admin.tls]\ncertificate = "{certificate}"\n'
    said = [problem for problem in (await check(parse_config(settings))).problems if problem.startswith("[admin")]
    assert said == [f"[admin.tls] {certificate}: No such file or directory"]
