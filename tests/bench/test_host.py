"""`bench host` with the fake engine: three processes, and the figures of each kind of phase."""

from __future__ import annotations

import json
import time

import anyio
import anyio.lowlevel
import pytest

from qwen3_asgi.bench.host import Delays
from qwen3_asgi.bench.host_app import HostSettings, Lag, host_process
from qwen3_asgi.bench.wire import Probe, Target
from qwen3_asgi.cli import main

SMALL = ["--model", "fake", "-n", "4", "--seconds", "0.3", "--rounds", "1", "--max-tokens", "40"]


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_idle_and_busy_are_reported(server, capsys):
    assert main(["bench", "host", "--server", server, "--json", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    for name in ("idle_ping", "busy_ping", "idle_lag", "busy_lag", "idle_cpu", "busy_cpu"):
        delays = report[name]
        assert delays["p50"] <= delays["p99"] <= delays["max"]
        assert delays["samples"] > 5
    assert report["steps_per_second"] > 0
    assert report["bytes_per_second"] > 0
    ratio = report["busy_ping"]["p99"] / report["idle_ping"]["p99"]
    assert report["ping_p99_ratio"] == round(ratio, 2)


def test_a_table_for_a_person(capsys):
    assert main(["bench", "host", *SMALL]) == 0
    out = capsys.readouterr().out
    for words in ("/ping, idle", "loop lag, busy", "busy / idle at p99", "4 streams"):
        assert words in out


def test_the_switch_interval_is_the_hosts_own_setting():
    with host_process(HostSettings("fake", switch_interval=0.0015)) as url:
        probe = Probe(Target.parse(url))
        assert json.loads(probe.get("/settings"))["switch_interval"] == pytest.approx(0.0015)
        probe.close()


def test_a_host_that_cannot_start_is_an_error(tmp_path, capfd):
    with (
        host_process(HostSettings(str(tmp_path))) as url,
        pytest.raises(ValueError, match="failed"),
    ):
        Probe(Target.parse(url)).load()
    assert "config.json" in capfd.readouterr().err


def test_a_blocked_loop_is_late():
    async def main_task():
        lag = Lag()
        async with anyio.create_task_group() as group:
            group.start_soon(lag.watch)
            await anyio.wait_all_tasks_blocked()
            block(0.05)
            while not (late := lag.take()):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        return late

    late, cpu = max(anyio.run(main_task))
    assert late > 40
    assert cpu > 0


def block(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_percentile_is_one_of_the_samples():
    delays = Delays.of([float(i) for i in range(1000, 0, -1)])
    assert (delays.p50, delays.p99, delays.max, delays.samples) == (501.0, 991.0, 1000.0, 1000)
    with pytest.raises(ValueError, match="nothing was measured"):
        Delays.of([])
