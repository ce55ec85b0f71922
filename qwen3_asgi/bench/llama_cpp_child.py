"""llama.cpp in a process of its own: `python -m qwen3_asgi.bench.llama_cpp_child FILE THREADS`.

Its threads and torch's would wait for work in a busy loop beside each other in one process. Lines
of JSON come in, one line of JSON goes out for each: the seconds that it took.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

UBATCH = 512
ROOM = 256


class Model:
    """Steps through the C interface; `tokens` of a row are made up."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._threads = threads
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda level, text, data: None
        )
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self._context: Any = None
        self._batch: Any = None

    def fill(self, batch: int, context: int) -> float:
        """A new context with `context` tokens for each of `batch` sequences."""
        self._open(batch, context + ROOM)
        begin = time.perf_counter()
        for sequence in range(batch):
            for start in range(0, context, UBATCH):
                end = min(context, start + UBATCH)
                self._run([(7 * at % 251, at, sequence, 0) for at in range(start, end)])
        self._held = context
        self._rows = batch
        return time.perf_counter() - begin

    def decode(self) -> float:
        """One token more for each sequence, and the best next one of each."""
        begin = time.perf_counter()
        self._run([(1 + row, self._held, row, 1) for row in range(self._rows)])
        for row in range(self._rows):
            self._best(row)
        self._held += 1
        return time.perf_counter() - begin

    def prefill(self, tokens: int) -> float:
        """A prompt into an empty context, and the best token after it."""
        self._open(1, tokens + 1)
        begin = time.perf_counter()
        for start in range(0, tokens, UBATCH):
            end = min(tokens, start + UBATCH)
            self._run([(7 * at % 251, at, 0, int(at == tokens - 1)) for at in range(start, end)])
        self._best((tokens - 1) % UBATCH)
        return time.perf_counter() - begin

    def _open(self, sequences: int, each: int) -> None:
        api = self._api
        if self._context is not None:
            api.llama_batch_free(self._batch)
            api.llama_free(self._context)
        settings = api.llama_context_default_params()
        settings.n_ctx = sequences * each
        settings.n_batch = settings.n_ubatch = UBATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.n_seq_max = sequences
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"llama.cpp has no context of {settings.n_ctx} tokens")
        self._batch = api.llama_batch_init(UBATCH, 0, 1)

    def _run(self, items: list[tuple[int, int, int, int]]) -> None:
        """`items`: token, position, sequence, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise ValueError(f"llama.cpp failed with status {status}")

    def _best(self, row: int) -> int:
        import numpy

        size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(size,)).argmax())


def main() -> None:
    model = Model(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"seconds": 0.0}), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(json.dumps({"seconds": getattr(model, name)(*values)}), flush=True)


if __name__ == "__main__":
    main()
