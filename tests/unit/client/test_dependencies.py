"""Packages that the client needs, and trace contexts of OpenTelemetry."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from splitserve_client import ResumableRequest, Submission, TraceContext, current_trace

ROOT = Path(__file__).parents[3]


def message_of(trace_context: TraceContext | None = None) -> tuple[str, str]:
    submission = Submission([1])
    if trace_context is not None:
        submission = Submission([1], trace_context=trace_context)
    message = ResumableRequest(submission, time.monotonic).message()
    return message.traceparent, message.tracestate


def test_request_names_the_current_span() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("of the caller"):
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)

        assert message_of() == (headers["traceparent"], "")
        assert message_of(TraceContext("given", "a=1")) == ("given", "a=1")


def test_request_is_untraced_when_its_caller_is() -> None:
    tracer = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("of the caller"):
        flags = int(current_trace().traceparent[-2:], 16)
        assert flags & 1 == 0


def test_request_belongs_to_nothing_when_no_span_is_current() -> None:
    assert message_of() == ("", "")


def test_opentelemetry_is_not_imported_for_that() -> None:
    program = """
import sys
from splitserve_client import current_trace
assert current_trace().traceparent == ""
print([name for name in sys.modules if "opentelemetry" in name])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(str(ROOT / each) for each in ("common", "protos", "clients"))},
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout == "[]\n"


PROGRAM = """
import sys

ALLOWED = {
    "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "jinja2", "markupsafe",
    "splitserve", "splitserve_client", "splitserve_common", "splitserve_contract",
    "splitserve_rpc", "splitserve_text", "tokenizers", "typing_extensions", "cython_runtime",
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
