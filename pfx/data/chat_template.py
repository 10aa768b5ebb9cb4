"""Chat messages to text by a Jinja template, and which of its characters the assistant wrote."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pfx.data.error import DataError
from pfx.errors import message

CHATML = (
    "{% for message in messages %}{% if message.content is not string %}"
    "{{ raise_exception('the content of a message is no text') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A plain template for models that have none."""

_MAX_BYTES = 1 << 24  # of a file with a template in it
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Rendered(NamedTuple):
    """A conversation as text, and the ranges of its characters that are learnt."""

    text: str
    spans: list[tuple[int, int]]


class TemplateFailure(Exception):
    """Why a template gave no text for a conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, in the dialect of transformers, run in a sandbox.

    What lies between ``{% generation %}`` and ``{% endgeneration %}`` is learnt. A template without
    these marks is run on the conversation up to and from each of the assistant's turns instead, and
    what a turn adds after the generation prompt is learnt; that needs a template which writes a
    turn the same whatever follows.

    Args:
        source: the template.
        variables: what it can use besides `messages`, such as ``bos_token``.
        name: what errors call it.

    Raises:
        DataError: the template is no Jinja.

    >>> template = ChatTemplate(CHATML)
    >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    >>> text, spans = template.render(chat)
    >>> [text[a:b] for a, b in spans]
    ['4<|im_end|>']
    """

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the chat template"

    def __post_init__(self) -> None:
        _ = self._compiled

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("source", "variables", "name")}

    @property
    def marked(self) -> bool:
        """Whether the template says itself what is learnt."""
        return self._compiled.marked

    def text(self, messages: Sequence[Any], *, prompt: bool = False, **variables: Any) -> str:
        """Return a conversation as text.

        Args:
            messages: dicts with a "role" and usually a "content".
            prompt: end with what begins the assistant's next turn.
            variables: for this conversation, such as ``tools``.

        Raises:
            TemplateFailure: the template refuses the conversation.
        """
        return self._compiled.unmarked(self._run(messages, prompt, variables)).text

    def render(self, messages: Sequence[Any], **variables: Any) -> Rendered:
        """Return a conversation as text and what of it is learnt.

        Raises:
            TemplateFailure: the template refuses the conversation or, having no marks, writes
                earlier turns differently where more follow.
        """
        whole = self._compiled.unmarked(self._run(messages, False, variables))
        if self.marked:
            return whole
        spans = []
        for i, turn in enumerate(messages):
            if turn.get("role") == "assistant":
                before = self.text(messages[:i], prompt=True, **variables)
                after = self.text(messages[: i + 1], **variables)
                if not (after.startswith(before) and whole.text.startswith(after)):
                    raise TemplateFailure(
                        f"the template has no {{% generation %}} marks, and writes message {i + 1} "
                        "or those before it differently where more messages follow"
                    )
                spans.append((len(before), len(after)))
        return Rendered(whole.text, spans)

    def _run(self, messages: Sequence[Any], prompt: bool, variables: Mapping[str, Any]) -> str:  # noqa: FBT001
        given = {"tools": None, "documents": None, **self.variables, **variables}
        try:
            return self._compiled.template.render(
                messages=messages, add_generation_prompt=prompt, **given
            )
        except Exception as error:  # a template can raise whatever it likes
            raise TemplateFailure(f"the template fails: {error}") from error

    @cached_property
    def _compiled(self) -> _Compiled:
        return _compile(self.source, self.name)


class _Compiled(NamedTuple):
    """A template whose generation blocks come out between two strings that no text can hold."""

    template: Any
    nonce: str
    begin: str
    end: str
    marked: bool

    def unmarked(self, text: str) -> Rendered:
        """Take the marks out of a text, and return where they were.

        Raises:
            TemplateFailure: they are not in pairs, one after the other.
        """
        first, *rest = text.split(self.begin)
        clean, spans = [first], []
        length = len(first)
        for part in rest:
            learnt, *after = part.split(self.end)
            if len(after) != 1:
                raise TemplateFailure(
                    "a {% generation %} is within another, or left before its end"
                )
            spans.append((length, length + len(learnt)))
            clean += [learnt, after[0]]
            length += len(learnt) + len(after[0])
        whole = "".join(clean)
        if self.nonce in whole.lower():
            raise TemplateFailure("a filter has changed what is within a {% generation %}")
        return Rendered(whole, spans)


def _compile(source: str, name: str) -> _Compiled:
    jinja2 = _import_jinja2()
    nonce = secrets.token_hex(16)
    begin, end = f"\0{nonce}<", f"\0{nonce}>"
    marks: list[int] = []

    class Generation(jinja2.ext.Extension):  # type: ignore[name-defined]
        """The block ``{% generation %}``."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            marks.append(line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            nodes = jinja2.nodes
            data = lambda text: nodes.Output([nodes.TemplateData(text)])
            return [node.set_lineno(line) for node in (data(begin), *body, data(end))]

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    for unneeded in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(unneeded, None)
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    environment.filters["tojson"] = _tojson
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        what = f"is no Jinja template: {error.message}."
        raise DataError(message(f"{name}, line {error.lineno},", what)) from error
    return _Compiled(template, nonce, begin, end, bool(marks))


def _raise(text: str) -> None:
    raise TemplateFailure(text)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (as transformers' filter)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON without jinja2's escapes for HTML."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def load_chat_template(path: str | os.PathLike[str]) -> ChatTemplate:
    """Return the chat template of a file or of a model's folder.

    Args:
        path: a file with a template; a ``tokenizer_config.json``; or a folder with that file, and
            with ``chat_template.jinja`` where the template is on its own. Special tokens that the
            config names (``bos_token``, ...) are the template's variables.

    Raises:
        DataError: there is no template there.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config_path = path if path.suffix == ".json" else folder / "tokenizer_config.json"
    config = _read_config(config_path) if config_path.is_file() else {}
    variables = {name: _token(config[name]) for name in _SPECIAL if config.get(name)}
    alone = path if path.is_file() and path.suffix != ".json" else folder / "chat_template.jinja"
    if alone.is_file():
        return ChatTemplate(_read(alone), variables, str(alone))
    source = config.get("chat_template")
    if isinstance(source, list):  # of several templates by name
        named = (one for one in source if isinstance(one, dict) and one.get("name") == "default")
        source = next(named, {}).get("template")
    if not isinstance(source, str):
        what = "has no chat template."
        fix = "give a file with a Jinja template, or pfx.data.ChatTemplate(pfx.data.CHATML)"
        raise DataError(message(str(path), what, fix=fix))
    return ChatTemplate(source, variables, str(config_path))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(message(str(path), f"is larger than {_MAX_BYTES} bytes."))
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(message(str(path), f"cannot be read: {error}.")) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(message(str(path), f"is no JSON: {error}.")) from error
    if not isinstance(config, dict):
        raise DataError(message(str(path), f"is a {type(config).__name__} and not an object."))
    return config


def _token(entry: Any) -> Any:
    """Return a special token's text; some files keep it in an object."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _import_jinja2() -> Any:
    try:
        import jinja2
        import jinja2.ext
    except ImportError as error:
        what, fix = "needs the package jinja2.", "pip install 'pfx[data]'"
        raise ImportError(message("a chat template", what, fix=fix)) from error
    return jinja2
