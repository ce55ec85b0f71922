"""Templates render as those of the hub expect, and can do nothing but render."""

from __future__ import annotations

import pytest

from qwen3_asgi.errors import InvalidRequest, ModelLoadError
from qwen3_asgi.text.template import ChatTemplate

USER = [{"role": "user", "content": "<b>é"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"eos_token": "E"}).render(USER, tools=[{"a": 1}])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content | tojson }}", '"<b>é"'),
        ("{{ tools | tojson(indent=1) }}", '[\n {\n  "a": 1\n }\n]'),
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ eos_token }}{{ enable_thinking }}{{ add_generation_prompt }}", "ETrueTrue"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_renders(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].missing.deeper }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_trips_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(source)
    assert refused.value.param == "messages"


def test_a_broken_template_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError):
        ChatTemplate("{% for %}")
