"""Chat templates of Hugging Face models: selection of a template and preparation of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict

from splitserve_text.errors import ChatTemplateFailed
from splitserve_text.template_sandbox import Sandbox
from splitserve_text.template_shapes import MessageShapes, text_arguments

Message = Mapping[str, Any]

_DEFAULT = "default"
_FOR_TOOLS = "tool_use"
_FOLDER = "additional_chat_templates/"
_SUFFIX = ".jinja"
# Variables that a caller must not set.
_OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_END_MARK = "end of what is to be continued "


class TemplateOptions(TypedDict, total=False):
    """Options for rendering a chat.

    `tools`: JSON schemas of functions, as in OpenAI's API. `documents`: for models trained with
    documents. `add_generation_prompt`: append the start of an answer (default: True, unless the
    final message is continued). `continue_final_message`: end the text within the last message.
    `template_name`: the template to use; default: "tool_use" if it exists and tools are given,
    otherwise "default". `variables`: other variables of this template, such as `enable_thinking`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    template_name: str | None
    variables: Mapping[str, Any] | None


class ChatTemplates:
    """Chat templates of a model, by name. Thread-safe.

    `text`: the source of all templates, and the texts of the `response_template`.
    `response_template`: the model's own description of its answers, unchecked; None without one.
    `default`: the source of the default template; None if there is none.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        sandbox: Sandbox | None = None,
        *,
        response_template: object = None,
    ) -> None:
        """Compiles `sources`. Raises ChatTemplateFailed if a source is no valid template."""
        self._special_tokens = dict(special_tokens)
        sandbox = sandbox or Sandbox()
        self._templates = {name: _Template(sandbox, sources[name]) for name in sources}
        self.default = sources.get(_DEFAULT)
        self.response_template = response_template
        self.text = "\n".join([*sources.values(), *_texts_in(response_template)])

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> Self | None:
        """Builds the templates from `files` by name and from `config`.

        `config`: content of `tokenizer_config.json`. Returns None if the model has no template.
        Raises ChatTemplateFailed.
        """
        sources = _named_sources(config.get("chat_template"))
        for name, content in files.items():
            if name == "chat_template.jinja":
                sources[_DEFAULT] = content.decode("utf-8", "replace")
            elif name.startswith(_FOLDER) and name.endswith(_SUFFIX):
                name = name.removeprefix(_FOLDER).removesuffix(_SUFFIX)
                sources[name] = content.decode("utf-8", "replace")
        if not sources:
            return None
        return cls(sources, special_tokens, response_template=config.get("response_template"))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text for `messages`; see TemplateOptions. Raises ChatTemplateFailed."""
        variables = variables or {}
        if taken := _OWN_VARIABLES & variables.keys():
            raise ChatTemplateFailed(f"the chat template variable {min(taken)!r} is reserved")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateFailed(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        template = self._choose(template_name, has_tools=bool(tools))
        chat = template.prepare(messages, has_tools=bool(tools))
        if continue_final_message:
            _mark_end(chat)
        values: dict[str, object] = {
            **self._special_tokens,
            "messages": chat,
            "tools": None if tools is None else _plain(tools),
            "documents": None if documents is None else _plain(documents),
            "add_generation_prompt": (
                not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt
            ),
            **_plain_mapping(variables),
        }
        try:
            text = template.render(values)
        except ChatTemplateFailed as error:
            if reason := text_arguments(chat):
                raise ChatTemplateFailed(f"{error}; {reason}") from error
            raise
        return _until_mark(text) if continue_final_message else text

    def _choose(self, name: str | None, *, has_tools: bool) -> _Template:
        if name is None:
            name = _FOR_TOOLS if has_tools and _FOR_TOOLS in self._templates else _DEFAULT
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise ChatTemplateFailed(f"the model has no chat template {name!r}; it has: {known}")
        return self._templates[name]


class _Template:
    """Compiled template, with the message shapes that it accepts."""

    def __init__(self, sandbox: Sandbox, source: str) -> None:
        self._sandbox = sandbox
        self._template = sandbox.compile(source)
        self._shapes = MessageShapes(self._render_probe)

    def prepare(self, messages: Sequence[Message], *, has_tools: bool) -> list[dict[str, Any]]:
        """Copies `messages` into the shapes that this template accepts.

        Raises ChatTemplateFailed.
        """
        plain = [_with_reasoning(_plain_mapping(message)) for message in messages]
        return self._shapes.fit(plain, has_tools=has_tools)

    def render(self, values: Mapping[str, object]) -> str:
        """Renders the template with the variables `values`. Raises ChatTemplateFailed."""
        return self._sandbox.render(self._template, values)

    def _render_probe(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> str:
        tokens = {"bos_token": "", "eos_token": "", "unk_token": "", "pad_token": ""}
        values = {"messages": list(messages), "tools": tools, "documents": None}
        return self.render({**tokens, **values, "add_generation_prompt": False})


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copies the reasoning of `message` to each field that templates read; models differ."""
    found = [message[name] for name in _REASONING_FIELDS if message.get(name) is not None]
    if not found:
        return message
    thinking = message.get("thinking") or found[0]
    return {**message, "thinking": thinking, "reasoning_content": found[0]}


# -- values for templates --------------------------------------------------------------------------


def _plain(value: object) -> Any:  # noqa: ANN401
    """Copies a value of JSON types; other objects have methods. Raises ChatTemplateFailed."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return value if type(value) is str else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    raise ChatTemplateFailed(f"a chat must consist of JSON values, got {type(value).__name__}")


def _plain_mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ChatTemplateFailed("a message must be a mapping with role and content")
    plain: dict[str, Any] = _plain(value)
    return plain


def _named_sources(template: object) -> dict[str, str]:
    """Returns the templates by name from the field `chat_template` of a configuration.

    The field is a text, or a list of names and templates.
    """
    if isinstance(template, str):
        return {_DEFAULT: template} if template else {}
    if not isinstance(template, list):
        return {}
    entries = [entry for entry in template if isinstance(entry, dict)]
    named = {entry.get("name"): entry.get("template") for entry in entries}
    return {k: v for k, v in named.items() if isinstance(k, str) and isinstance(v, str)}


def _texts_in(value: object) -> list[str]:
    """Returns all texts in a value of JSON types; patterns without their backslashes."""
    if isinstance(value, str):
        return [value.replace("\\", "")]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list) else []


# -- continuing a message --------------------------------------------------------------------------


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Appends a mark to the text of the last message.

    Raises ChatTemplateFailed if it has no text.
    """
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _END_MARK
    else:
        raise ChatTemplateFailed("there is no final message with a text to continue")


def _until_mark(text: str) -> str:
    """Cuts `text` at the mark. Raises ChatTemplateFailed if the template dropped the mark."""
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        raise ChatTemplateFailed("the chat template does not write the final message unchanged")
    # A template that strips whitespace around the mark also strips the end of any message.
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
