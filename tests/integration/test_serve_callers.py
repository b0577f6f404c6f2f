"""`splitserve serve` for callers with keys, over HTTPS: as a user sets it up."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai

from tests.contract.stranger.process import poll
from tests.integration.test_serve_cli import Serve
from tests.support.processes.gateway import trusting
from tests.support.processes.patience import PATIENCE_S
from tests.support.security.cluster import Certificates
from tests.support.security.key_file import KeyFile


def run_curl(arguments: str, key: str) -> str:
    environment = {**os.environ, "SPLITSERVE_API_KEY": key}
    command = ["bash", "-c", f"curl --silent --show-error {arguments}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def wait_until_refused(client: openai.OpenAI, model: str) -> openai.APIStatusError:
    """The scheduler looks at the file of keys again within seconds."""

    async def ask() -> tuple[bool, Any]:
        try:
            return False, client.completions.create(model=model, prompt="A fox", max_tokens=4)
        except openai.APIStatusError as error:
            return True, error

    refused: openai.APIStatusError = await poll(ask)
    return refused


def test_callers_are_known_over_https(tmp_path: Path) -> None:
    keys, own = KeyFile(tmp_path), tmp_path / "gateway.txt"
    own.write_text(keys.add("gateway", "--scope=gateway"))
    alice, bob = (keys.add(tenant) for tenant in ("alice", "bob"))
    certificates = Certificates.make(tmp_path / "certificates")
    files = certificates.files("gateway")
    with Serve(
        f"--api-keys={keys.path}",
        f"--gateway-key-file={own}",
        f"--http-tls-cert={files.cert}",
        f"--http-tls-key={files.key}",
    ) as serve:
        serve.read_until("Ctrl-C stops the server.")
        assert "callers need keys" in serve.output
        (curl,) = [line for line in serve.output.splitlines() if "curl https" in line]
        assert "authorization: Bearer $SPLITSERVE_API_KEY" in shlex.split(curl.rstrip("\\"))
        assert "curl: --cacert FILE, too" in serve.output
        _, _, shown = serve.output.partition("  curl ")
        if shutil.which("curl") is not None:
            line = " ".join(shown.splitlines()[:2]).replace("\\ ", "")
            assert "usage" in json.loads(run_curl(f"{line} --cacert {files.ca}", alice))
        verify = trusting(files)
        with openai.DefaultHttpxClient(verify=verify, trust_env=False, timeout=PATIENCE_S) as http:
            base_url = f"https://{serve.http}/v1"
            client = openai.OpenAI(
                base_url=base_url, api_key=alice, max_retries=0, http_client=http
            )
            model = client.models.list().data[0].id
            answer = client.completions.create(
                model=model, prompt="A fox", max_tokens=4, temperature=0
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4

            keys.revoke(alice)
            assert asyncio.run(wait_until_refused(client, model)).status_code == 401

            # It is no fault of callers when it is the gateway whom nobody knows any more.
            client = client.with_options(api_key=bob)
            keys.revoke(own.read_text())
            assert asyncio.run(wait_until_refused(client, model)).status_code == 503
