"""Flags that one process raises: all see them at the same step, soon, and once."""

import pytest
import torch

from tests.distributed.pair import together
from vitrail.distributed.process_group import EVERY, FlagSync, World

STEPS = 12


def test_alone_a_flag_is_seen_at_once() -> None:
    accord = FlagSync(World(device=torch.device("cpu")))
    assert [accord(step, (step == 3, False)) for step in (1, 2, 3, 4)] == [
        (False, False),
        (False, False),
        (True, False),
        (False, False),
    ]


def seen(world: World, rank: int, raised_at: int) -> list[int]:
    """At which steps this process sees the flag that one of them raises at a step, and leaves up until it is seen."""
    accord, raised, found = FlagSync(world), False, list[int]()
    for step in range(1, STEPS + 1):
        raised = raised or (step == raised_at and world.rank == rank)
        other, told = accord(step, (False, raised))
        assert not other
        if told:
            found.append(step)
            raised = False
    return found


def each(world: World) -> list[list[int]]:
    return [seen(world, rank, step) for rank in range(world.size) for step in range(1, 3)]


@pytest.mark.slow
def test_all_see_a_flag_at_the_same_step_and_once() -> None:
    first, *others = together(each)
    assert all(other == first for other in others)
    for number, steps in enumerate(first):
        assert len(steps) == 1
        assert 0 < steps[0] - (number % 2 + 1) < 2 * EVERY


def left_up(world: World) -> list[int]:
    accord = FlagSync(world)
    return [step for step in range(1, STEPS + 1) if accord(step, (world.is_main,))[0]]


@pytest.mark.slow
def test_a_flag_that_stays_up_is_seen_again_once_its_cause_had_time_to_go() -> None:
    assert together(left_up) == [[4, 8, 12], [4, 8, 12]]
