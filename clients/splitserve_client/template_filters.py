"""Filters of chat templates: the Jinja filters that chats use, each with limits."""

from __future__ import annotations

import functools
import html
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.filters

from splitserve_client.template_limits import CurrentBudget

# Filters for HTML or for display, whose cost is hard to predict.
_NO_FILTERS = ("center", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that split a text: each character may become a text, a list item and a key.
_CUTTING_FILTERS = frozenset(
    (*("batch", "groupby", "indent", "slice", "sort", "title", "unique"), "urlencode", "wordcount")
)
_CUT_BYTES = 128
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

    def escape(value: object) -> str:
        return html.escape(str(value)).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")

    # Autoescape is off, so no text needs a mark as safe.
    escapes = dict.fromkeys(("e", "escape", "forceescape"), escape)
    return {**escapes, "format": format_, "indent": indent, "replace": replace, "safe": str}


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
