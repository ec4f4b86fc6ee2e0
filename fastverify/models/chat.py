"""Renders chat templates: jinja2 in a sandbox, with the helpers that Hugging Face templates rely on."""

import json
from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .config import LoadError


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks assistant text for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """json.dumps; jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return env.from_string(template)


def render(template: str, messages: list, add_generation_prompt: bool, **variables) -> str:
    """The text of `messages` ([{"role": ..., "content": ...}]) under a chat template.

    variables: what the template may also read (bos_token, eos_token, tools, ...). Errors: LoadError, one sentence, for a
    template that does not parse or that refuses the messages.
    """
    given = {"tools": None, "documents": None, **variables}
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as exc:
        raise LoadError(f"apply_chat_template: the messages must fit the model's template; got {type(exc).__name__}: {exc}. "
                        "Fix: check roles and contents of the messages.") from None
