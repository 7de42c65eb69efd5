"""Engines that the tests of this folder share; each is compiled once a process."""

from collections.abc import Iterator

import pytest
import tiny

from pagedweight_jax.serving.build import Built, build_engine

PINNED_BITS = 5
TIGHT_BLOCK = 4


@pytest.fixture(scope="session")
def oracle() -> tiny.Oracle:
    """What an engine at PINNED_BITS must compute."""
    return tiny.Oracle(PINNED_BITS)


@pytest.fixture(scope="session")
def _roomy() -> Built:
    chosen = tiny.options(
        pin_bits=PINNED_BITS, max_model_len=128, max_num_batched_tokens=128
    )
    return build_engine(tiny.paged_model(), chosen)


@pytest.fixture(scope="session")
def _tight() -> Built:
    model = tiny.paged_model()
    chosen = tiny.options(pin_bits=PINNED_BITS, block_size=TIGHT_BLOCK)
    budget = tiny.smallest_budget(model, chosen)
    chosen = tiny.options(
        pin_bits=PINNED_BITS, block_size=TIGHT_BLOCK, memory_budget=budget
    )
    return build_engine(model, chosen)


@pytest.fixture
def roomy(_roomy) -> Iterator[Built]:
    """At fixed bits, with memory for all; two prefill rows of 64 tokens a step."""
    yield _roomy
    tiny.assert_idle(_roomy)


@pytest.fixture
def tight(_tight) -> Iterator[Built]:
    """At the same bits, with memory for one sequence: 16 blocks of 4 tokens.

    One prefill row of 32 tokens a step.
    """
    yield _tight
    tiny.assert_idle(_tight)
