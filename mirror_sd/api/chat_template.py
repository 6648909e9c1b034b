"""A model's chat template, rendered by the conventions of Hugging Face's `apply_chat_template`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mirror_sd.errors import InvalidRequest, ModelError


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template; rendering is thread-safe.

    `special_tokens` are the strings a template may name (`bos_token`, `eos_token`). Raises
    `ModelError` where the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(self, messages: Iterable[tuple[str, str]]) -> str:
        """The prompt text for (role, content) pairs, up to where the assistant's answer begins.

        `developer` becomes `system` for a template that does not know it. Raises `InvalidRequest`
        where the template refuses the conversation, with the template's own reason.
        """
        conversation = [
            {"role": self._role(role), "content": content} for role, content in messages
        ]
        try:
            return self._template.render(
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and not self._knows_developer else role


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would show up in the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
