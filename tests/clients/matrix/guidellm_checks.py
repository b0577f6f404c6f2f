"""Checks of GuideLLM: a benchmark of chats and one of completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.matrix.checks import MODEL, TEXT, URL, run, says

TOKENIZER = Path(__file__).resolve().parents[3] / "executor_service" / "bundled_model"
NUM_REQUESTS = 5


def benchmark(request_format: str, said: str) -> None:
    """Checks that every request of a benchmark is answered with `said`."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        data.write_text(f"{json.dumps({'prompt': says(said)})}\n" * NUM_REQUESTS, encoding="utf-8")
        backend = f"kind=openai_http,target={URL},model={MODEL}"
        options = {
            "backend": f"{backend},request_format={request_format}",
            "profile": "kind=synchronous",
            "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "data": f"kind=json_file,path={data}",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "output": f"kind=json,path={report}",
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        done = subprocess.run(
            [sys.executable, "-m", "guidellm", "run", "--disable-console", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests: dict[str, Any] = result["requests"]
    assert requests["errored"] == []
    assert [each["output"] for each in requests["successful"]] == [said] * NUM_REQUESTS


def chat() -> None:
    benchmark("/v1/chat/completions", TEXT)


def completion() -> None:
    # It sends no max_tokens: an answer has at most 16.
    benchmark("/v1/completions", "The fox")


if __name__ == "__main__":
    run("guidellm", chat, completion)
