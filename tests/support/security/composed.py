"""What `docker-compose.tls.yml` says, for a folder of this machine in place of its volumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "/etc/splitserve"
SERVICES_WITH_TLS = yaml.safe_load((ROOT / "docker-compose.tls.yml").read_text())["services"]


def environment(service: str, folder: Path | None = None) -> dict[str, str]:
    """The variables of a service. `folder`: where its files are instead."""
    entries = SERVICES_WITH_TLS[service]["environment"]
    if folder is not None:
        entries = [entry.replace(FOLDER, str(folder)) for entry in entries]
    return dict(entry.split("=", 1) for entry in entries)


def set_up(folder: Path) -> None:
    """Runs `setup`."""
    (script,) = SERVICES_WITH_TLS["setup"]["command"]
    assert SERVICES_WITH_TLS["setup"]["entrypoint"] == ["sh", "-euc"]
    script = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", script).replace(FOLDER, str(folder))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-euc", script], check=True, env={**os.environ, "PATH": path})
