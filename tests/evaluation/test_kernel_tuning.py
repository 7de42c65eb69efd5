from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pagedweight_jax.evaluation import kernel_tuning
from pagedweight_jax.evaluation.kernel_tuning import Problem, fastest


def repeated(x: jax.Array, times: int) -> jax.Array:
    return jax.lax.fori_loop(0, times, lambda _, y: jnp.sin(y @ x), x)


def lower(config: int) -> jax.stages.Lowered:
    if config < 0:
        raise NotImplementedError("does not fit")
    return jax.jit(partial(repeated, times=config)).lower(jnp.ones((64, 64)))


def test_the_fastest_that_fits_is_chosen():
    calls = [(jnp.ones((64, 64)),)] * 5
    problem = Problem(candidates=[2000, -1, 1, 3000], lower=lower, calls=calls)
    config, seconds = fastest(problem)
    assert config == 1 and seconds > 0


def test_a_shape_that_no_candidate_fits_is_told():
    with pytest.raises(ValueError, match="none of 2 candidates fits"):
        fastest(Problem(candidates=[-1, -2], lower=lower, calls=[]))


def test_a_device_without_kernels_is_refused():
    with pytest.raises(ValueError, match="kernels are tuned on a GPU"):
        kernel_tuning.tunables()
