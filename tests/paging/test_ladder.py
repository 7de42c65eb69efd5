import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pagedweight_jax.paging.ladder import Ladders, hull_slopes

NUM_LEVELS = 6

# Whole numbers, so that the slopes of equal chords are equal floats.
steps_of_ladder = hnp.arrays(np.float32, NUM_LEVELS - 1, elements=st.integers(0, 9))


def falling(steps: np.ndarray) -> np.ndarray:
    """Damage at each level of a ladder with these steps."""
    return np.append(np.cumsum(steps[::-1], dtype=np.float32)[::-1], np.float32(0))


def lower_hull(damage: np.ndarray) -> list[float]:
    """The hull of one ladder by pooling neighbours that are out of order."""
    pools = [[d] for d in damage[:-1] - damage[1:]]
    i = 0
    while i + 1 < len(pools):
        if np.mean(pools[i]) < np.mean(pools[i + 1]):
            pools[i : i + 2] = [pools[i] + pools[i + 1]]
            i = max(i - 1, 0)
        else:
            i += 1
    return [float(np.mean(pool)) for pool in pools for _ in pool]


@given(
    st.lists(steps_of_ladder, min_size=1, max_size=4),
    st.integers(0, NUM_LEVELS - 2),
    st.integers(1, NUM_LEVELS - 1),
)
def test_slopes_are_those_of_the_lower_convex_hull(
    steps: list[np.ndarray], low: int, size: int
):
    high = min(low + size, NUM_LEVELS - 1)
    damage = np.stack([falling(s) for s in steps], axis=1)
    cut = np.full(len(steps), low), np.full(len(steps), high)
    slopes = hull_slopes(damage, *cut)
    for page in range(len(steps)):
        expected = lower_hull(damage[low : high + 1, page])
        np.testing.assert_allclose(slopes[low:high, page], expected, rtol=1e-6)
    assert (slopes[1:] <= slopes[:-1]).all(), "steps of a page would change order"


def ladders_of(damage: np.ndarray, floor: int = 2, seed_bits: int = 2) -> Ladders:
    pages = damage.shape[1]
    parent_bits = seed_bits + len(damage) - 1
    return Ladders(
        desired=np.full(pages, parent_bits, np.int32),
        held=np.full(pages, parent_bits, np.int32),
        floor=np.full(pages, floor, np.int32),
        frozen=np.zeros(pages, bool),
        price=np.tile((2, 1), pages // 2),
        damage=damage.astype(np.float32),
        parent_bits=parent_bits,
    )


def test_steps_go_down_by_damage_per_byte():
    # Steps 3 and 4 of a gate_up and of a down page; gate_up planes weigh two.
    ladders = ladders_of(np.array([[9, 8], [3, 2], [0, 0]]))
    # Per byte: gate_up 4: 1.5, 3: 3; down 4: 2, 3: 6.
    assert ladders.steps_down(ladders.desired).tolist() == [0, 1, 0, 1]


def test_equal_steps_go_down_evenly():
    ladders = ladders_of(np.zeros((4, 4)))
    assert ladders.steps_down(ladders.desired).tolist() == [0, 1, 2, 3] * 3


def test_steps_up_load_seeds_then_floors_then_by_damage():
    damage = np.array([[9.0, 80], [3, 2], [0, 0]])
    ladders = ladders_of(damage, floor=3)
    zero = np.zeros(2, np.int32)
    pages, steps = ladders.steps_up(zero, ladders.desired)
    assert list(zip(pages.tolist(), steps.tolist(), strict=True)) == [
        *[(0, 1), (1, 1), (0, 2), (1, 2)],  # seeds, most significant first
        *[(1, 3), (0, 3)],  # to the floors, dearest per byte first
        *[(1, 4), (0, 4)],
    ]


@pytest.mark.parametrize("direction", ["down", "up"])
def test_the_order_of_steps_is_by_floats_even_when_they_are_tiny(direction: str):
    values = np.float32([1e-30, -0.0, 3e-38, 1e-45, 2e-8, 1e3])
    damage = np.stack([np.repeat(values, 2), np.zeros(12)])
    ladders = ladders_of(damage, floor=2)
    ladders = Ladders(**{**vars(ladders), "price": np.ones(12, int)})
    if direction == "down":
        pages = ladders.steps_down(ladders.desired)
    else:
        pages, _ = ladders.steps_up(ladders.desired - 1, ladders.desired)
        pages = pages[::-1]
    assert (np.diff(np.repeat(values, 2)[pages]) >= 0).all()


def test_no_pages_have_no_steps():
    ladders = ladders_of(np.zeros((3, 2)))
    assert ladders.steps_down(ladders.floor).size == 0
    assert ladders.steps_up(ladders.desired, ladders.desired)[0].size == 0
