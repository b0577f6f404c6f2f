"""A process that compiles grammars for nobody, to see whether they can be: see `trial.py`.

Each line of its input is a JSON object: `grammar`, a text for llguidance, and the limits. To each
it answers with a line, a JSON string: what is wrong with the grammar, or nothing.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_NICENESS = 10


def _answer_all() -> None:
    # One token for each byte: what takes long does so with any vocabulary.
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        task = json.loads(line)
        _limit_cpu(task["max_cpu_s"])
        limits = LLParserLimits(**task["parser_limits"])
        matcher = LLMatcher(tokenizer, task["grammar"], log_level=0, limits=limits)
        sys.stdout.write(json.dumps(matcher.get_error()) + "\n")
        sys.stdout.flush()


def _limit_cpu(seconds: int) -> None:
    """The process ends when it has used so much more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + seconds, resource.RLIM_INFINITY))


def main(max_bytes: int, stack_bytes: int) -> None:
    """Answers until its input ends."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
