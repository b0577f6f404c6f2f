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
from tests.integration.test_serve_cli import Serve, run_command
from tests.support.processes.gateway import trusting
from tests.support.security.cluster import Certificates


def new_key(file: Path, *arguments: str) -> str:
    done = run_command("keys", "add", str(file), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
    keys, own = tmp_path / "keys.json", tmp_path / "gateway.txt"
    own.write_text(new_key(keys, "--tenant=gateway", "--scope=gateway"))
    alice, bob = (new_key(keys, f"--tenant={tenant}") for tenant in ("alice", "bob"))
    certificates = Certificates.make(tmp_path / "certificates")
    files = certificates.files("gateway")
    with Serve(
        f"--api-keys={keys}",
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
        with openai.DefaultHttpxClient(verify=verify, trust_env=False, timeout=60.0) as http:
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

            key_id = alice.split("-")[2]
            assert run_command("keys", "revoke", str(keys), key_id).returncode == 0
            assert asyncio.run(wait_until_refused(client, model)).status_code == 401

            # It is no fault of callers when it is the gateway whom nobody knows any more.
            client = client.with_options(api_key=bob)
            gateway_id = own.read_text().split("-")[2]
            assert run_command("keys", "revoke", str(keys), gateway_id).returncode == 0
            assert asyncio.run(wait_until_refused(client, model)).status_code == 503
