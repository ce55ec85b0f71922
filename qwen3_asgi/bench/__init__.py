"""Benchmarks that users can repeat: `qwen3-asgi bench …`."""
