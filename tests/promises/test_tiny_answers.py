"""The bundled model, asked through the chat endpoint, answers questions worded as it never saw."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from qwen3_asgi.tiny.heldout import heldout_items

AT_ONCE = 16
LONGEST_TOKENS = 320


def ask(server, item):
    body = {
        "model": "tiny",
        "messages": list(item.messages),
        "temperature": 0,
        "max_tokens": LONGEST_TOKENS,
        "chat_template_kwargs": {"enable_thinking": item.enable_thinking},
    }
    if item.tools:
        body["tools"] = list(item.tools)
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    parsed = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return item.check(message["content"] or "", parsed)


def test_nine_of_ten_held_out_questions_are_answered_rightly(tiny_server):
    items = heldout_items()
    assert len(items) >= 300
    with ThreadPoolExecutor(AT_ONCE) as threads:
        right = list(threads.map(lambda item: ask(tiny_server, item), items))
    wrong = Counter(item.category for item, ok in zip(items, right, strict=True) if not ok)
    assert sum(right) >= 0.9 * len(items), f"{sum(right)} of {len(items)}; wrong: {wrong}"
