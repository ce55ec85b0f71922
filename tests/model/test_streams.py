"""Steps of two threads on one CUDA device run on a stream each; elsewhere nothing changes."""

from __future__ import annotations

import threading

import pytest
import torch

from qwen3_asgi.model.streams import ThreadStreams

pytestmark = pytest.mark.torch


def test_on_a_cpu_it_only_runs_what_is_inside() -> None:
    ran = []
    with ThreadStreams(torch.device("cpu")).own():
        ran.append(1)
    assert ran == [1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_thread_has_a_stream_and_has_waited_for_it() -> None:
    device = torch.device("cuda")
    streams = ThreadStreams(device)
    seen: dict[str, list[int]] = {}
    sums: list[float] = []

    def work(name: str) -> None:
        for _ in range(2):
            with streams.own():
                seen.setdefault(name, []).append(torch.cuda.current_stream(device).cuda_stream)
                total = torch.ones(1 << 24, device=device).cumsum(0)[-1]
            assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
            sums.append(float(total))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("decode", "prefill")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [float(1 << 24)] * 4
    assert all(len(set(used)) == 1 for used in seen.values())
    assert seen["decode"][0] != seen["prefill"][0]
    default = torch.cuda.default_stream(device).cuda_stream
    assert default not in (seen["decode"][0], seen["prefill"][0])
