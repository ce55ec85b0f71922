"""What a server with a stage has counted, read as a scraper and through `/stage/state`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hosts.server import Server


def live(server: Server) -> int:
    load = server.load()
    return int(load["num_running"] + load["num_waiting"])


def read_counters(server: Server) -> dict[str, float]:
    endings: dict[str, int] = server.get("/stage/state").json()["endings"]
    finished = endings.get("finished", 0)
    return {
        "disconnects": server.metric("qwen3_asgi_client_disconnects_total"),
        "cancelled": server.metric("qwen3_asgi_requests_cancelled_total"),
        "aborted": server.metric("vllm:request_success_total", finished_reason="abort"),
        "wasted": server.metric("qwen3_asgi_wasted_tokens_total"),
        "generated": server.metric("vllm:generation_tokens_total"),
        "finished": finished,
        "unfinished": sum(endings.values()) - finished,
    }
