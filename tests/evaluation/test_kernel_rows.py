"""Targets of the kernel bench, on rows that are made up."""

import pytest

from pagedweight_jax.evaluation.kernel_rows import (
    MIXED,
    RAGGED_DOT,
    TORCH_GROUPED,
    Check,
    Row,
    checks,
)


def row(**other) -> Row:
    """A row of the Qwen shape at 4 bits, all experts active, at 70 % of 1 GB/s."""
    fields = {
        "shape": "qwen",
        "format": "affine",
        "group_size": "128",
        "bits": "4",
        "mean_bits": 4.0,
        "num_tokens": 16,
        "routing": "balanced",
        "active_experts": 60.0,
        "num_experts": 60,
        "top_k": 4,
        "seconds": 1.0,
        "kernels": 5.0,
        "plane_bytes": 0.6e9,
        "table_bytes": 0.1e9,
        "ceiling": 1e9,
    }
    return Row(**fields | other)


def of(target: str, subject: Row, *others: Row) -> Check:
    found = [c for c in checks(subject, [subject, *others]) if c.target == target]
    assert len(found) == 1, f"{target} not once in {found}"
    return found[0]


def test_planes_and_tables_are_held_against_the_ceiling():
    check = of("% of ceiling", row())
    assert (check.measured, check.limit, check.met) == (pytest.approx(70), 70, True)
    assert "met" in str(check)
    slower = of("% of ceiling", row(seconds=1.1))
    assert not slower.met and "MISSED" in str(slower)


@pytest.mark.parametrize(
    "other",
    [
        {"active_experts": 59.0},
        {"num_tokens": 4096},
        {"format": "codebook"},
        {"bits": "5"},
        {"pages": "in order"},
        {"group_size": "row"},
        {"shape": "tiny"},
    ],
)
def test_the_ceiling_speaks_of_decoding_with_all_experts(other):
    assert "% of ceiling" not in [c.target for c in checks(row(**other), [])]


@pytest.mark.parametrize("format", ["codebook", "refined"])
def test_formats_are_held_against_affine_of_the_same_cell(format):
    subject = row(format=format, group_size="-", seconds=1.2)
    others = [row(), row(bits="6", seconds=9), row(group_size="row", seconds=9)]
    check = of("time / affine", subject, *others)
    assert check.measured == pytest.approx(1.2) and check.met


def test_mixed_bits_are_held_against_uniform_bits_of_equal_bytes():
    subject = row(bits=MIXED, mean_bits=4.25, seconds=1.3)
    others = [row(seconds=1.0), row(bits="5", mean_bits=5.0, seconds=2.0)]
    check = of("time / uniform of equal bytes", subject, *others)
    assert check.measured == pytest.approx(1.3 / 1.25) and check.met
    assert checks(subject, [subject, others[0]]) == []


def test_groups_and_page_order_are_held_against_the_simpler_case():
    others = [row(group_size="row", seconds=0.9), row(pages="in order", seconds=0.99)]
    subject = row()
    assert not of("time / row scales", subject, *others).met
    assert of("time / contiguous", subject, *others).met


def test_rivals_are_those_of_the_same_routing():
    rival = {"format": "bf16", "group_size": "", "bits": "16"}
    others = [
        row(implementation=TORCH_GROUPED, **rival, seconds=3.1),
        row(implementation=TORCH_GROUPED, **rival, seconds=9.0, routing="random"),
        row(implementation=RAGGED_DOT, **rival, seconds=9.0),
    ]
    check = of(f"speed-up over {TORCH_GROUPED}", row(), *others)
    assert check.measured == pytest.approx(3.1) and check.limit == 3.0 and check.met
    assert all(checks(other, others) == [] for other in others)
