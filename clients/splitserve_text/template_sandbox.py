"""Jinja environment for chat templates of models: compatible, sandboxed and limited."""

from __future__ import annotations

import datetime
import functools
import html
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from splitserve_text.errors import ChatTemplateFailed
from splitserve_text.template_limits import (
    CurrentBudget,
    RenderBudget,
    TemplateLimitExceeded,
    TemplateLimits,
)

# Filters for HTML or for display, whose cost is hard to predict.
_NO_FILTERS = ("center", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that split a text: each character may become a text, a list item and a key.
_CUTTING_FILTERS = frozenset(
    (*("batch", "groupby", "indent", "slice", "sort", "title", "unique"), "urlencode", "wordcount")
)
_CUT_BYTES = 128
_MAX_ESCAPED = len("&quot;")  # the longest escape of a character
Filter = Callable[..., Any]


def make_filters(current: CurrentBudget) -> dict[str, Filter]:
    """Returns the filters by name; they take the budget of the calling thread from `current`."""
    special = {
        **_text_filters(current),
        **_list_filters(current),
        "tojson": functools.partial(_to_json, current),
    }
    usual = {name: use for name, use in jinja2.filters.FILTERS.items() if name not in _NO_FILTERS}
    return {name: _checking(current, name, found) for name, found in (usual | special).items()}


def _checking(current: CurrentBudget, name: str, found: Filter) -> Filter:
    """Wraps the filter `found` so that its arguments and results stay within the budget."""
    cut_bytes = _CUT_BYTES if name in _CUTTING_FILTERS else 1

    @functools.wraps(found)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        budget = current.get()
        for argument in (*args[1:], *kwargs.values()):
            if isinstance(argument, int):  # the size argument of batch, slice, round, truncate
                budget.check_num_chars(argument)
        for argument in args[:2]:  # the first may be Jinja's environment or context
            if isinstance(argument, str):
                budget.check_num_bytes(cut_bytes * len(argument))
        result = found(*args, **kwargs)
        if isinstance(result, str):
            budget.check_num_chars(len(result))
            budget.charge(result)
        elif isinstance(result, list | tuple | dict):
            budget.charge(result)
            budget.check_value(result)
        elif isinstance(result, Iterator):
            return budget.charge_each(result)
        return result

    return checked


def _text_filters(current: CurrentBudget) -> dict[str, Filter]:
    def format_(value: object, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        current.get().check_format(str(value), args or kwargs)
        return jinja2.filters.do_format(str(value), *args, **kwargs)

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        num_columns = len(width) if isinstance(width, str) else width
        num_lines = len(str(s).splitlines()) + 1
        current.get().check_num_chars(len(str(s)) + num_lines * max(num_columns, 0))
        return jinja2.filters.do_indent(str(s), width, first, blank)

    def replace(s: object, old: object, new: object, count: int | None = None) -> str:
        current.get().check_replace(str(s), str(old), str(new))
        return str(s).replace(str(old), str(new), -1 if count is None else count)

    escapes = dict.fromkeys(("e", "escape", "forceescape"), _escaped)
    return {**escapes, "format": format_, "indent": indent, "replace": replace, "safe": _Safe}


class _Safe(str):
    """Text that is safe as HTML, as by the filter `safe`; what is added to it is escaped.

    Autoescape is off, so this affects additions alone. The templates of some models rely on it
    unknowingly: transformers escapes there.
    """

    __slots__ = ()


def _escaped(value: object) -> _Safe:
    return _Safe(html.escape(str(value)).replace("&quot;", "&#34;").replace("&#x27;", "&#39;"))


def _added(budget: RenderBudget, left: str, right: str) -> _Safe:
    """Joins two texts, one of which is marked as safe: the other is escaped as HTML."""
    texts = [left, right]
    for index, text in enumerate(texts):
        if not isinstance(text, _Safe):
            budget.check_num_chars(_MAX_ESCAPED * len(text))
            texts[index] = _escaped(text)
    budget.check_num_chars(sum(map(len, texts)))
    return _Safe("".join(texts))


def _list_filters(current: CurrentBudget) -> dict[str, Filter]:
    @jinja2.pass_environment
    def join(
        environment: jinja2.Environment,
        value: Iterable[Any],
        d: object = "",
        attribute: str | int | None = None,
    ) -> str:
        if attribute is not None:
            value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
        items = current.get().collect(str(item) for item in value)
        current.get().check_num_chars(len(items) * len(str(d)))
        return str(d).join(items)

    def list_(value: Iterable[Any]) -> list[Any]:
        return current.get().collect(value)

    @jinja2.pass_environment
    def sum_(
        environment: jinja2.Environment,
        iterable: Iterable[Any],
        attribute: str | int | None = None,
        start: Any = 0,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if attribute is not None:
            iterable = map(jinja2.filters.make_attrgetter(environment, attribute), iterable)
        if isinstance(start, list):
            items = current.get().collect(iterable)
            return [*start, *itertools.chain.from_iterable(items)]
        # adding 0 fails for anything but numbers
        return sum((item + 0 for item in iterable), start + 0)

    return {"join": join, "list": list_, "sum": sum_}


def _to_json(
    current: CurrentBudget,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without escapes; Jinja's own filter escapes it for HTML."""
    budget = current.get()
    budget.check_value(value)
    budget.check_num_chars(len(indent) if isinstance(indent, str) else indent or 0)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(budget.collect(encoder.iterencode(value)))


_MAX_SOURCE_CHARS = 1_000_000
_MAX_MESSAGE_CHARS = 1000
_NO_METHODS = frozenset(("translate", "maketrans", "fromkeys", "to_bytes", "from_bytes"))
_SPLITTING_METHODS = frozenset(("split", "rsplit", "splitlines", "partition", "rpartition"))
# Methods of lists and dictionaries that copy; the other methods return existing items or modify.
_COPYING_METHODS = frozenset(("copy",))
_PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


T = TypeVar("T")


class Sandbox:
    """Renders templates within limits. Thread-safe."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._current = CurrentBudget()
        self._environment = _Environment(self._current)

    def compile(self, source: str) -> jinja2.Template:
        """Compiles a template. Raises ChatTemplateFailed if `source` is no valid template."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise ChatTemplateFailed(
                f"the model's chat template has {len(source)} characters; allowed: at most "
                f"{_MAX_SOURCE_CHARS}"
            )
        make = self._environment.from_string
        return self._within_limits("is invalid", lambda: make(source))

    def render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """Renders `template`.

        Raises ChatTemplateFailed with the template's message, or the exceeded limit.
        """

        def run() -> str:
            budget = self._current.get()
            budget.check_value(variables)
            return "".join(budget.collect(template.generate(variables)))

        return self._within_limits("failed", run)

    def _within_limits(self, verdict: str, work: Callable[[], T]) -> T:
        before = self._current.budget
        self._current.budget = budget = RenderBudget(self._limits)
        try:
            with budget.watching():
                return work()
        except TemplateLimitExceeded as error:
            raise ChatTemplateFailed(f"the model's chat template {verdict}: {error}") from None
        except Exception as error:  # any error is the template's own fault
            message = str(error)[:_MAX_MESSAGE_CHARS] or type(error).__name__
            raise ChatTemplateFailed(f"the model's chat template {verdict}: {message}") from error
        finally:
            self._current.budget = before


class _GenerationTag(jinja2.ext.Extension):
    """Block `{% generation %}`, which marks assistant text for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Generates code that reports composed values to the environment.

    Such values involve no operator or call that the environment would intercept.
    """

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.concat_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        # The environment intercepts items, but not slices, which are copies.
        if isinstance(node.arg, jinja2.nodes.Slice):
            self.write("environment.charged(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._checked(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._checked(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._checked(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _checked(
        self, visit: Callable[..., None], node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame
    ) -> None:
        self.write("environment.checked(")
        visit(node, frame)
        self.write(")")


class _Namespace(jinja2.utils.Namespace):
    """Namespace without a printed content: namespaces may contain each other."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _CodeGenerator

    def __init__(self, current: CurrentBudget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self._current = current
        self.filters = make_filters(current)
        self.globals = {
            "cycler": lambda *items: jinja2.utils.Cycler(*self.checked(items)),
            "joiner": jinja2.utils.Joiner,
            "range": jinja2.sandbox.safe_range,
            "dict": lambda *args, **kwargs: self.checked(dict(*args, **kwargs)),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def concat(self, texts: Iterable[str]) -> str:
        """Joins the output of a macro, block or template; checks and charges its size."""
        texts = list(texts)
        budget = self._current.get()
        budget.check_num_chars(sum(map(len, texts)))
        return budget.charge("".join(texts))

    def concat_texts(self, values: tuple[object, ...]) -> str:
        """Implements the operator `~`: joins `values` as texts."""
        return self.concat([str(value) for value in values])

    def charged(self, value: T) -> T:
        """Charges the new `value` and returns it."""
        return self._current.get().charge(value)

    def checked(self, value: T) -> T:
        """Checks the size of `value` and returns it."""
        self._current.get().check_value(value)
        return value

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        self._current.get().check_operation(operator, left, right)
        are_texts = isinstance(left, str) and isinstance(right, str)
        if operator == "+" and are_texts and _Safe in (type(left), type(right)):
            return self.charged(_added(self._current.get(), left, right))
        return self.charged(super().call_binop(context, operator, left, right))

    def call(
        __self,  # noqa: N805 - a template may name its own argument `self`
        __context: jinja2.runtime.Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        budget = __self._current.get()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | type):
            args = _check_method(budget, owner, __obj.__name__, args, kwargs)
        elif isinstance(__obj, jinja2.runtime.Macro) and (
            __obj.catch_varargs or __obj.catch_kwargs
        ):
            budget.check_value((args, kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, dict | list | tuple) and __obj.__name__ not in _COPYING_METHODS:
            return result
        return result if result is owner else budget.charge(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        budget = self._current.get()

        @functools.wraps(wrapped)
        def format_checked(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
            budget.check_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return format_checked


def _check_method(
    budget: RenderBudget,
    owner: Any,  # noqa: ANN401
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Checks the cost of a method of a text, number or dictionary beforehand.

    Returns its arguments.
    """
    if name in _NO_METHODS or (isinstance(owner, bytes) and name != "decode"):
        raise jinja2.exceptions.SecurityError(f"templates cannot call {name}()")
    if name in _PADDING_METHODS:
        widths = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
        budget.check_num_chars((len(owner) + 1) * max(widths, default=8))
    elif name in _SPLITTING_METHODS and isinstance(owner, str):
        budget.check_split(owner, name, args[0] if args else kwargs.get("sep"))
    elif name == "replace" and len(args) > 1:
        budget.check_replace(owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        items = budget.collect(args[0])
        budget.check_num_chars(len(items) * len(owner))
        return (items,)
    return args


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
