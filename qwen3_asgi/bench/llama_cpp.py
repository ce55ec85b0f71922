"""llama.cpp as a peer of `bench step`, on a GGUF file of the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class LlamaCpp:
    """Steps in a child process, each timed there. Close it.

    Raises:
        ValueError: llama-cpp-python is not installed, or it cannot load the file.
    """

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int) -> None:
        if find_spec("llama_cpp") is None:
            raise ValueError(
                "comparing needs llama.cpp, built on this machine: "
                "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary :all: llama-cpp-python"
            )
        if not path.is_file():
            raise ValueError(f"no such GGUF file: {path} (`bench make-model` writes one)")
        command = [sys.executable, "-m", "qwen3_asgi.bench.llama_cpp_child", str(path)]
        self._child = subprocess.Popen(
            [*command, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def prepare(self, batch: int, context: int) -> None:
        self._ask("fill", batch, context - 1)

    def decode(self) -> float:
        return self._ask("decode")

    def prefill(self, prompt: list[int]) -> float:
        return self._ask("prefill", len(prompt))

    def close(self) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _ask(self, name: str, *values: int) -> float:
        assert self._child.stdin is not None
        print(json.dumps([name, *values]), file=self._child.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self.close()
            raise ValueError(f"llama.cpp ended with status {self._child.returncode}")
        return float(json.loads(line)["seconds"])
