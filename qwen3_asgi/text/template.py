"""Renders a checkpoint's chat template in a sandbox that can neither mutate nor import.

The template comes from the model's folder, never from a request. Called by `Tokenizer`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen3_asgi.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    Raises:
        ModelLoadError: the source is not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        # The settings that templates on the hub are written against: without them the rendered
        # whitespace, and so the prompt, differs from what the model was trained on.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from error
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
    ) -> str:
        """Return the prompt's text.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        try:
            return self._template.render(
                self._variables,
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            # A template has no types: whatever it trips over is something in these messages.
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would put `\u003c` into the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
