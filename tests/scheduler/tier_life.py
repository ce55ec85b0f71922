"""Random lives of a scheduler with tiers: few prompts that are evicted and come back all the time.

The fake executor checks the content of every block that a row stands on.
"""

from __future__ import annotations

from random import Random

from qwen3_asgi.scheduler.executor import Place
from qwen3_asgi.scheduler.request import State
from tests.scheduler.harness import Harness, prompt_of

PROMPTS = 12
OPERATIONS = 500


def tier_life(seed: int) -> Harness:
    """`OPERATIONS` times somebody comes, leaves, is copied or is run; then everything ends well.

    Raises:
        AssertionError: an output is wrong, or something was lost.
    """
    random = Random(seed)
    harness = Harness(
        num_kv_blocks=random.choice([10, 14]),
        host_slots=random.choice([0, 6, 12, 40]),
        file_slots=random.choice([0, 20]),
        overlap=random.random() < 0.3,
        max_batch=3,
        trace=None,
        observer=None,
    )
    for number in range(OPERATIONS):
        match random.choices(range(5), weights=[4, 2, 3, 9, 0.3])[0]:
            case 0:
                length = random.choice([9, 13, 21])
                prompt = prompt_of(f"{random.randrange(PROMPTS)}", length)
                harness.submit(f"r{number}", prompt, max_tokens=random.randrange(1, 5))
            case 1:
                loading = harness.queue(State.LOADING)
                live = loading if loading and random.random() < 0.5 else harness.order()
                if live:
                    harness.cancel(random.choice(live))
            case 2:
                harness.tiers.land(random.randrange(1 + harness.tiers.num_running))
                harness.lanes.land(*list(harness.lanes.running)[: random.randrange(3)])
            case 3:
                harness.step()
            case 4:
                place = Place(random.choice(["host", "file"]), random.randrange(6))
                harness.tiers.broken ^= {place}
    harness.run_all()
    for name, request in harness.requests.items():
        end = harness.end(name)
        assert end.reason in ("length", "abort"), end.error
        tokens = harness.tokens(name)
        assert tokens == harness.expected(name, len(tokens))
        assert end.reason == "abort" or len(tokens) == request.max_tokens
    return harness
