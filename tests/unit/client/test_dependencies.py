"""The client alone needs few packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys

ALLOWED = {
    "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "jinja2", "markupsafe",
    "splitserve", "splitserve_client", "splitserve_rpc", "splitserve_text", "tokenizers",
    "typing_extensions", "cython_runtime",
}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in ALLOWED and root not in sys.stdlib_module_names and not root.startswith("_"):
            raise ModuleNotFoundError(f"the client is not to need {name}")

sys.meta_path.insert(0, Blocker())
import splitserve_client
from splitserve_client import Client, Tokenizer, StopStrings

template = b"{{ messages[0].content }}"
files = {"tokenizer.json": sys.stdin.buffer.read(), "chat_template.jinja": template}
tokenizer = Tokenizer.from_files(files)
ids = tokenizer.encode_chat([{"role": "user", "content": "the fox"}])
detokenizer = tokenizer.detokenizer()
print(detokenizer.push(ids) + detokenizer.finish())
with Client("127.0.0.1:1") as client:
    try:
        client.complete_text("x")
    except splitserve_client.ServerUnreachable:
        print("unreachable")
"""


def test_client_works_when_nothing_but_its_few_packages_is_installed() -> None:
    from tests.support.models import tiny_tokenizers

    path = os.pathsep.join(str(ROOT / folder) for folder in ("clients", "common", "protos"))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=tiny_tokenizers.byte_level().to_str().encode(),
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
    )

    assert result.stdout.decode().splitlines() == ["the fox", "unreachable"], result.stderr.decode()
