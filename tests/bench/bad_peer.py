"""A completions server that never looks whether its client is still there, as a process of its own.

Requests wait for each other and each costs CPU time for every token that it asked for, whoever is
gone. Fields that it does not know are a 422. Prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

TOKEN_CPU_SECONDS = 0.01
KNOWN = {"model", "prompt", "max_tokens", "temperature", "stream"}
MODELS = {"data": [{"id": "bad"}]}


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def main() -> None:
    device = asyncio.Lock()

    async def answer(method: str, body: bytes) -> tuple[int, object]:
        if method == "GET":
            return 200, MODELS
        asked = json.loads(body)
        if unknown := set(asked) - KNOWN:
            return 422, f"no such field: {sorted(unknown)}"
        async with device:
            for _ in range(asked["max_tokens"]):
                burn(TOKEN_CPU_SECONDS)
                await asyncio.sleep(0)  # others are let in, to wait
        return 200, {"choices": [{"text": "x", "finish_reason": "length"}]}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method = head.split(b" ", 1)[0].decode()
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        status, said = await answer(method, body)
        text = json.dumps(said).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
