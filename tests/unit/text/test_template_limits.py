# ruff: noqa: E501 - templates in one line
"""A template cannot take more time or memory than it may, whatever it does."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest
from jinja2.filters import FILTERS

from splitserve_client import ChatTemplateFailed
from splitserve_text import Sandbox, TemplateLimits
from tests.support.processes.patience import PATIENCE_S

# Each of them asks for more than a machine has, or for ever.
GREEDY = {
    "mul": '{{ "a" * 10**9 }}',
    "mullist": "{{ ([1]*10**9)|length }}",
    "pow": "{{ 9**9**9 }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "double": '{% set ns=namespace(x="aaaa") %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}',
    "doubleplus": '{% set ns=namespace(x="aaaa") %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}',
    "dlist": "{% set ns=namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "ddict": '{% set ns=namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = {"a":ns.x, "b":ns.x} %}{% endfor %}{{ ns.x|tojson }}',
    "dtuple": "{% set ns=namespace(x=1) %}{% for i in range(64) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x:1} }}",
    "ddictcall": "{% set ns=namespace(x=1) %}{% for i in range(64) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "nsloop": "{% set ns=namespace() %}{% set ns.a = ns %}{{ ns }}",
    "macro": "{% macro m(n) %}{{ m(n+1) }}{% endmacro %}{{ m(0) }}",
    "varargs": "{% macro m(n) %}{% if n < 60 %}{{ m(n+1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}{{ m(0, 1, 2) }}",
    "recloop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "fmt": '{{ "%1000000000d" % 1 }}',
    "fmt2": '{{ "{:1000000000}".format(1) }}',
    "fmt3": '{{ "{:{w}}".format(1, w=10**9) }}',
    "fmt4": '{{ "%*d" % (10**9, 1) }}',
    "fmt5": '{{ "%(a)1000000000d" % {"a":1} }}',
    "fmt6": '{{ "%1000000000d"|format(1) }}',
    "fmt7": '{{ (("%s"*100000) % ((("b"*100000),)*100000)) }}',
    "fmt8": '{{ ("{0}"*100000).format("b"*100000) }}',
    "center": '{{ "a"|center(10**9) }}',
    "ljust": '{{ "a".ljust(10**9) }}',
    "zfill": '{{ "a".zfill(10**9) }}',
    "expandtabs": '{{ "\t".expandtabs(10**9) }}',
    "tobytes": '{{ (1).to_bytes(10**9, "big") }}',
    "enc": '{{ "a".encode().ljust(10**9) }}',
    "replace": '{{ ("a"*1000000).replace("a", "b"*1000000)|length }}',
    "replacef": '{{ ("a"*1000000)|replace("a", "b"*1000000)|length }}',
    "join": '{{ ("b"*1000000).join("a"*1000000) }}',
    "joinf": '{{ ("a"*1000000)|join("b"*1000000) }}',
    "joinmap": '{{ ("a"*1000000)|map("replace","a","b"*100000)|join|length }}',
    "listmap": '{{ ("a"*1000000)|map("replace","a","b"*100000)|list|length }}',
    "sortmap": '{{ ("a"*1000000)|map("replace","a","b"*100000)|sort|length }}',
    "indent": '{{ ("a\n"*100000)|indent(100000) }}',
    "jsonindent": "{{ [1]|tojson(indent=10**9) }}",
    "jsonindent2": '{{ ([[1]]*10000)|tojson(indent="a"*1000000) }}',
    "sum": "{{ ([[1]*1000]*1000)|sum(start=[])|sum(start=[]) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "round": "{{ 1|round(10**9) }}",
    "setblock": '{% set x %}{% for i in range(100000) %}{{ "a"*100000 }}{% endfor %}{% endset %}',
    "output": '{% for i in range(100000) %}{{ "a"*100000 }}{% endfor %}',
    "default": '{{ ([0]*100000)|map("default", [1]*100000, true)|list }}',
    "fromkeys": "{{ {}.fromkeys([1,2], 3) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "striptags": '{{ "<!--"|striptags }}',
    "intmul": "{% set ns=namespace(x=9) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "deepsrc": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deepif": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "bigint": "{{ " + "9" * 10000 + " }}",
    "deeplist": "{% set ns=namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "strftime": '{{ strftime_now("%1000000000d") }}',
    "raise": '{{ raise_exception("a"*4000000) }}',
    "include": '{% include "x" %}',
    "class": "{{ ''.__class__.__mro__ }}",
    "div": "{{ 1/0 }}",
    "sortbig": '{{ range(100000)|map("string")|sort|join|length }}',
    "constfold": '{{ "a"|replace("a","b"*9)' + '|replace("b","bbbbbbbbb")' * 50 + " }}",
    "while": "{% for a in range(100000) if [range(100000)|list] %}{% endfor %}",
    "join_gen": '{{ range(100000)|map("string")|map("replace","1","2"*100000)|join|length }}',
    "cyc": "{% set ns=namespace(x=[1]) %}{% for i in range(64) %}{% set c = cycler(ns.x, ns.x) %}{% set ns.x = c.items %}{% endfor %}{{ ns.x }}",
    "groupby": '{% set ns=namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [{"a":1,"b":ns.x},{"a":1,"b":ns.x}]|groupby("a") %}{% endfor %}{{ ns.x }}',
}

HARMLESS = ("pow", "nsloop", "strftime")
# Where a tick is a look at the clock, these many are enough for any real chat.
NUM_TICKS = 2_000
MAX_BYTES = 100_000_000
# The limit of what is made, the same again for a moment, and what Python needs for all that.
MAX_KEPT_BYTES = 4_000_000


def ticking_clock() -> Callable[[], float]:
    """Its time passes by looking at it, so that no machine is too slow for a test."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def make_sandbox() -> Sandbox:
    """With little time and memory."""
    limits = TemplateLimits(
        cpu_s=NUM_TICKS,
        num_chars=1_000_000,
        total_num_chars=10_000_000,
        clock=ticking_clock(),
    )
    return Sandbox(limits)


def run(source: str) -> str:
    sandbox = make_sandbox()
    return sandbox.render(sandbox.compile(source), {"messages": []})


@pytest.mark.parametrize("name", sorted(GREEDY.keys() - set(HARMLESS)))
def test_a_template_is_refused_when_it_asks_for_too_much(name: str) -> None:
    traced_by = sys.gettrace()
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateFailed):
            run(GREEDY[name])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < MAX_BYTES
    assert sys.gettrace() is traced_by


@pytest.mark.parametrize("name", HARMLESS)
def test_template_is_rendered_when_harmless(name: str) -> None:
    assert len(run(GREEDY[name])) < 100


def test_a_template_is_stopped_when_it_runs_in_a_thread() -> None:
    limits = TemplateLimits(cpu_s=0.05)
    failures: list[Exception] = []

    def work() -> None:
        sandbox = Sandbox(limits)
        try:
            sandbox.render(sandbox.compile(GREEDY["nested"]), {})
        except ChatTemplateFailed as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)

    assert [str(error) for error in failures] == [
        "the model's chat template failed: it took more than 0.05 s"
    ]
    assert limits.clock is time.thread_time


def test_deep_recursion_is_refused_in_a_thread() -> None:
    failures: list[Exception] = []

    def work() -> None:
        for name in ("macro", "recloop", "deepsrc", "deepif", "deeplist"):
            try:
                run(GREEDY[name])
            except ChatTemplateFailed as error:
                failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)

    assert len(failures) == 5


def test_chat_is_refused_when_larger_than_any_prompt() -> None:
    sandbox = make_sandbox()
    template = sandbox.compile("{{ messages | length }}")

    with pytest.raises(ChatTemplateFailed, match="more than 1000000 characters"):
        sandbox.render(template, {"messages": [{"content": "a" * 1_000_001}]})
    assert sandbox.render(template, {"messages": []}) == "0"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ [1, 2] + [3] }} {{ 'a' ~ 1 ~ none }} {{ 'ab' * 2 }}", "[1, 2, 3] a1None abab"),
        ("{{ '%s in %d' % ('x', 2024) }} {{ '{} of {:>3}'.format(1, 2) }}", "x in 2024 1 of   2"),
        ("{{ 'On 12345: %s' | format('y') }}", "On 12345: y"),
        ("{% set ns = namespace(a=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + [i] %}"
         "{% endfor %}{{ ns.a | join(', ') }}", "0, 1, 2"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ [[1], [2]] | sum(start=[]) }} {{ [1, 2] | sum }}", "[1, 2] 3"),
        ("{{ 'a-b'.split('-') | map('upper') | list }} {{ 'x'.center(3) }}", "['A', 'B']  x "),
        ("{{ '<&' | e }} {{ '<&' | safe }} {{ 'a\nb' | indent(2) }}", "&lt;&amp; <& a\n  b"),
        ("{% macro m(a) %}<{{ a }}{{ varargs }}>{% endmacro %}{{ m(1, 2) }}", "<1(2,)>"),
        ("{{ 2 ** 8 }} {{ 7 % 4 }} {{ 'aXa'.replace('X', 'YY') }}", "256 3 aYYa"),
    ],
)  # fmt: skip
def test_a_template_does_what_jinja_does_when_it_is_modest(source: str, expected: str) -> None:
    assert run(source) == expected


# Arguments with which methods make as much as they can; most of all others tell, and make nothing.
_ARGUMENTS = {
    "split": "' '", "rsplit": "' '", "partition": "' '", "rpartition": "' '", "replace": "' ', '  '",
    "removeprefix": "'a'", "removesuffix": "' '", "join": "t", "center": "100000", "ljust": "100000",
    "rjust": "100000", "zfill": "100000", "format": "t",
}  # fmt: skip
_TELLING = re.compile(r"_|is|r?find|r?index|count|startswith|endswith")
_ITERATORS = ("batch", "items", "map", "reverse", "select", "slice", "unique")
_PROGRAMS = [
    *(
        f"{owner}.{name}({_ARGUMENTS.get(name, '')})"
        for owner, kind in {"t": str, "w": str, "l": list, "d": dict}.items()
        for name in dir(kind)
        if _TELLING.match(name) is None
    ),
    *(f"{owner}.split()" for owner in "tw"),
    *(f"w|{name}" for name in FILTERS if name not in _ITERATORS),
    *(f"l|{name}" for name in ("join", "list", "sort", "string", "tojson", "default")),
    *(f"{owner}|{name}|list" for owner in "wl" for name in ("reverse", "select", "unique")),
    *(f"w{rest}|list" for rest in ("|batch(1)", "|slice(9)", "|map('upper')", "|select|map('e')")),
    *(f"d|{name}|list" for name in ("dictsort", "items", "list")),
    *("t[1:]", "w[1:]", "l[1:]", "t[::-1]", "(t ~ t)[:-1]", "l[::2]", "(l, t)[:1]"),
    *("t ~ w", "t + w", "l + l", "l * 2", "t * 2", "'%s' % t", "[l, t]", "{'a': t, 'b': l}"),
    *("dict(a=t)", "namespace(a=t)", "range(9000)|list", "m(w|batch(1))", "m(w)", "t.encode()"),
]


@pytest.mark.cases(30)
@pytest.mark.parametrize("program", _PROGRAMS)
def test_template_memory_is_bounded_for_every_operation(program: str) -> None:
    """Each level of a recursion keeps what it makes."""
    source = (
        "{% macro m(x) %}{% for c in x %}{{ loop.length }}{{ c }}{% endfor %}{% endmacro %}"
        "{% macro keep(n) %}"
        f"{{% set kept = {program} %}}{{% if n %}}{{{{ keep(n - 1) }}}}{{% endif %}}"
        "{% endmacro %}{{ keep(60) }}"
    )
    limits = TemplateLimits(
        cpu_s=NUM_TICKS, num_chars=400_000, total_num_chars=1_000_000, clock=ticking_clock()
    )
    sandbox = Sandbox(limits)
    variables = {
        "t": "ab " * 40_000,
        "w": "\U0001f600 b" * 10_000,
        "l": ["ab"] * 16_000,
        "d": {str(number): "ab" for number in range(4_000)},
    }
    tracemalloc.start()
    try:
        with suppress(ChatTemplateFailed):
            sandbox.render(sandbox.compile(source), variables)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_KEPT_BYTES


def test_real_chat_is_rendered_when_a_context_long() -> None:
    """As templates of reasoning models take answers apart, with a million words of them."""
    source = (
        "{% for message in messages %}{% set content = message.content.split('</think>')[-1]"
        ".lstrip('\\n') %}{% set ns = namespace(reasoning=message.content.split('</think>')[0]"
        ".rstrip('\\n').split('<think>')[-1].strip()) %}{{ '<|' ~ message.role ~ '|>' }}"
        "{{ '<think>' + ns.reasoning + '</think>' + content | trim }}{% endfor %}"
    )
    sandbox = Sandbox(TemplateLimits(clock=lambda: 0.0))
    message = {
        "role": "assistant",
        "content": "<think>\n" + "why " * 250 + "</think>\n" + "so " * 250,
    }
    text = sandbox.render(sandbox.compile(source), {"messages": [message] * 2000})
    assert text.count("<|assistant|>") == 2000
