import time

import jax.numpy as jnp
import pytest

from pagedweight_jax.evaluation import device_timer
from pagedweight_jax.evaluation.device_timer import time_calls, wall_seconds


def test_without_a_gpu_the_wall_clock_times_each_call():
    numbers = []

    def call(i: int):
        numbers.append(i)
        time.sleep(0.01)
        return jnp.zeros(())

    times = time_calls(call, 3, warmup=2)
    assert numbers == [-1, -2, 0, 1, 2]
    assert times.source == "wall clock" and len(times.seconds) == 3
    assert all(0.01 <= seconds < 1 for seconds in times.seconds)


def test_the_median_run_counts():
    pauses = iter([0.3, 0.01, 0.01, 0.2])

    def run():
        time.sleep(next(pauses))

    assert 0.01 <= wall_seconds(run) < 0.1


def test_kernels_are_summed_call_by_call():
    kernels = [("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 4.0)]
    times = device_timer._summary(kernels, 2)
    assert times.seconds == (0.003, 0.007) and times.kernels == 2
    assert times.by_name == {"b": (0.003, 1), "a": (0.002, 1)}
    assert list(times.by_name) == ["b", "a"]
    assert times.median == 0.005


def test_calls_of_unequal_kernels_share_the_time():
    times = device_timer._summary([("a", 1.0), ("b", 2.0), ("a", 3.0)], 2)
    assert times.seconds == pytest.approx((0.003, 0.003)) and times.kernels == 1.5
