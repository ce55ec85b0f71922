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


SLEEP_CYCLES = 2**31  # a second or so


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_told_to_go_on_is_not_waited_for() -> None:
    device = torch.device("cuda")
    streams = ThreadStreams(device)
    with streams.own() as turn:
        torch.cuda._sleep(SLEEP_CYCLES)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        turn.waits = False
    assert not done.query()
    with streams.own():
        pass  # the same stream, so it waits for both
    assert done.query()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_was_launched_before_an_error_is_waited_for_all_the_same() -> None:
    device = torch.device("cuda")
    streams = ThreadStreams(device)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fail() -> None:
        with streams.own() as turn:
            turn.waits = False
            torch.cuda._sleep(SLEEP_CYCLES)
            done.record()
            raise ValueError("a bad row")

    with pytest.raises(ValueError, match="a bad row"):
        fail()
    assert done.query()
