"""Free blocks as maximal runs: a sequence that grows finds its next block next to its last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.scheduler.runs import FreeRuns

SIZE = 16
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("after"), st.integers(0, SIZE - 1)),
        st.tuples(st.just("add"), st.integers(0, SIZE - 1)),
    ),
    max_size=60,
)


def test_new_set_is_one_run() -> None:
    runs = FreeRuns(4)
    assert len(runs) == 4
    assert list(runs) == [0, 1, 2, 3]


def test_empty_pool_has_nothing_to_take() -> None:
    runs = FreeRuns(0)
    assert (len(runs), list(runs), runs.take(1), runs.take_after(3)) == (0, [], None, None)


def test_sequence_grows_through_a_run() -> None:
    runs = FreeRuns(8)
    block = runs.take(8)
    taken = [block]
    while block is not None:
        block = runs.take_after(block)
        taken.append(block)
    assert taken == [0, 1, 2, 3, 4, 5, 6, 7, None]


def test_taken_successor_is_not_taken_again() -> None:
    runs = FreeRuns(3)
    assert runs.take(1) == 0
    assert runs.take_after(0) == 1
    assert runs.take_after(0) is None


def test_neighbours_merge_whatever_comes_back_first() -> None:
    runs = FreeRuns(3)
    for _ in range(3):
        runs.take(1)
    for block in (0, 2, 1):
        runs.add(block)
    assert runs.take(3) == 0
    assert [runs.take_after(0), runs.take_after(1)] == [1, 2]


def test_longest_run_is_used_for_a_new_sequence() -> None:
    runs = FreeRuns(10)
    held = [runs.take(1)]
    while held[-1] is not None:
        held.append(runs.take_after(held[-1]))
    for block in (0, 1, 5, 6, 7, 9):
        runs.add(block)
    assert runs.take(3) == 5


def test_newcomer_leaves_room_behind_a_sequence_that_may_grow() -> None:
    runs = FreeRuns(20)
    first = runs.take(1)
    second = runs.take(1)
    assert first == 0
    assert second is not None
    assert second > 8, "the first sequence could not grow"
    assert runs.take_after(first) == 1


@given(OPERATIONS)
def test_free_set_agrees_with_a_plain_set(operations: list[tuple[str, int]]) -> None:
    runs, free = FreeRuns(SIZE), set(range(SIZE))
    for verb, number in operations:
        match verb:
            case "take":
                block = runs.take(number)
                assert (block is None) == (not free)
                if block is not None:
                    free.remove(block)
            case "after" if number not in free:
                block = runs.take_after(number)
                assert block == (number + 1 if number + 1 in free else None)
                free.discard(number + 1)
            case "add" if number not in free:
                runs.add(number)
                free.add(number)
        assert len(runs) == len(free)
        assert sorted(runs) == sorted(free)
