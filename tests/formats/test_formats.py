"""Laws that hold for every format."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from format_cases import (
    FORMATS,
    SHAPE,
    levels,
    random_importance,
    random_weights,
    seeds,
    weighted_error,
)
from hypothesis import given, settings

from pagedweight_jax.formats import (
    AffineFormat,
    CodebookFormat,
    Format,
    RefinedFormat,
    make_format,
)
from pallas_kernels import bitplane
from pallas_kernels.fused_moe import reference

each_format = pytest.mark.parametrize("form", FORMATS, ids=str)

few = settings(max_examples=8)


@each_format
@few
@given(seed=seeds)
def test_a_level_reads_only_its_planes(form: Format, seed: int):
    codes, tables = form.quantize(random_weights(seed))
    for bits in levels(form):
        absent = form.parent_bits - bits
        noise = np.random.default_rng(seed).integers(0, 2**absent, codes.shape)
        other = (codes >> absent << absent) | noise.astype(np.uint8)
        np.testing.assert_array_equal(
            form.dequantize(codes, tables, bits), form.dequantize(other, tables, bits)
        )


@each_format
@few
@given(seed=seeds)
def test_the_error_falls_with_the_bits(form: Format, seed: int):
    w, h = random_weights(seed), random_importance(seed)
    codes, tables = form.quantize(w, h)
    errors = [
        weighted_error(w, form.dequantize(codes, tables, b), h, w.size)[0]
        for b in levels(form)
    ]
    assert all(b < a for a, b in itertools.pairwise(errors)), errors


@each_format
@few
@given(seed=seeds)
def test_the_error_keeps_its_bound(form: Format, seed: int):
    w, h = random_weights(seed), random_importance(seed)
    codes, tables = form.quantize(w, h)
    k = w.shape[-1]
    size = form.group_size_for(k) if isinstance(form, AffineFormat) else k
    spread = np.ptp(w.reshape(-1, size), axis=1)
    for bits in levels(form):
        value = form.dequantize(codes, tables, bits)
        error = np.sqrt(weighted_error(w, value, h, size)) / spread
        # Side tables are float16: 2**-11 of the largest weight, a few times.
        assert error.max() <= form.max_error(bits) + 2**-10


@each_format
@few
@given(seed=seeds)
def test_quantising_permuted_rows_permutes_the_result(form: Format, seed: int):
    w, h = random_weights(seed), random_importance(seed)
    order = np.random.default_rng(seed).permutation(w.shape[1])
    codes, tables = form.quantize(w, h)
    permuted, permuted_tables = form.quantize(w[:, order], h[:, order])
    np.testing.assert_array_equal(permuted, codes[:, order])
    np.testing.assert_array_equal(
        form.dequantize(permuted, permuted_tables, form.seed_bits),
        np.asarray(form.dequantize(codes, tables, form.seed_bits))[:, order],
    )


@each_format
def test_importance_is_relative_to_its_row(form: Format):
    w, h = random_weights(0), random_importance(0)
    scaled = h * np.float32(2.0**-20)
    np.testing.assert_array_equal(form.quantize(w, h)[0], form.quantize(w, scaled)[0])


@each_format
def test_what_matters_is_stored_better(form: Format):
    w, h = random_weights(1), random_importance(1)
    plain, weighted = form.quantize(w), form.quantize(w, h)
    errors = [
        sum(
            2.0**bits * weighted_error(w, form.dequantize(*result, bits), h, w.size)[0]
            for bits in levels(form)
        )
        for result in (weighted, plain)
    ]
    assert errors[0] < 0.95 * errors[1]


@each_format
@few
@given(seed=seeds)
def test_planes_hold_the_codes(form: Format, seed: int):
    codes, tables = form.quantize(random_weights(seed, SHAPE))
    experts, n, k = SHAPE
    planes = bitplane.pack(codes, form.parent_bits, tables.order)
    assert planes.shape == (experts, form.parent_bits, bitplane.plane_words(n, k))
    for bits in levels(form):
        kept = np.asarray(bitplane.unpack(planes[:, :bits], n, k, tables.order))
        wanted = bitplane.truncate(jnp.asarray(codes), form.parent_bits, bits)
        np.testing.assert_array_equal(kept, wanted)
        first = reference.dequantize(
            planes[:1],
            jnp.int32(bits),
            type(tables)(**{name: t[0] for name, t in vars(tables).items()}),
            k,
        )
        np.testing.assert_array_equal(
            first, np.asarray(form.dequantize(codes, tables, bits))[0]
        )


@each_format
@pytest.mark.parametrize("importance", ["none", "zero", "one column"])
def test_degenerate_rows_are_sane(form: Format, importance: str):
    rng = np.random.default_rng(0)
    w = random_weights(0)
    w[0] = 0.0  # an expert of zeros
    w[1, 0] = 0.25  # a constant row
    w[1, 1] = rng.choice(np.float32([-0.5, 0.125]), 128)
    w[1, 2] = rng.choice(np.float32([-1, -0.5, 0.125, 2]), 128)
    w[1, 3] = 1e-6 * w[1, 3]
    h = {"none": None, "zero": np.zeros_like(w)}.get(importance, np.ones_like(w))
    if importance == "one column":
        h = np.zeros_like(w)
        h[..., 5] = 1
    codes, tables = form.quantize(w, h)
    assert codes.max() < 2**form.parent_bits
    for table in vars(tables).values():
        assert np.isfinite(np.asarray(table)).all()
    for bits in levels(form):
        value = np.asarray(form.dequantize(codes, tables, bits))
        assert (value[0] == 0).all()
        assert (value[1, 0] == 0.25).all()
        low, high = w.min(axis=-1, keepdims=True), w.max(axis=-1, keepdims=True)
        slack = (high - low) / 8 + 1e-6
        assert ((value >= low - slack) & (value <= high + slack)).all()


@each_format
def test_bad_weights_are_named(form: Format):
    w = random_weights(0)
    with pytest.raises(ValueError, match="not negative"):
        form.quantize(w, -np.abs(w))
    w[1, 2, 3] = np.nan
    with pytest.raises(ValueError, match=r"largest weight is nan.*float16"):
        form.quantize(w)
    w[1, 2, 3] = 1e6
    with pytest.raises(ValueError, match=r"largest weight is 1000000"):
        form.quantize(w)


@pytest.mark.parametrize(("seed_bits", "parent_bits"), [(0, 4), (5, 4), (3, 9)])
@pytest.mark.parametrize("kind", [AffineFormat, CodebookFormat, RefinedFormat])
def test_bits_out_of_range_are_refused(kind, seed_bits: int, parent_bits: int):
    with pytest.raises(ValueError, match=f"parent_bits={parent_bits}.*<= 8"):
        kind(seed_bits=seed_bits, parent_bits=parent_bits)


@each_format
def test_a_level_that_is_not_stored_is_refused(form: Format):
    codes, tables = form.quantize(random_weights(0))
    for bits in (form.seed_bits - 1, form.parent_bits + 1):
        with pytest.raises(ValueError, match=f"bits={bits} must be between"):
            form.dequantize(codes, tables, bits)


@each_format
def test_side_table_bytes_are_those_of_the_tables(form: Format):
    _, tables = form.quantize(random_weights(0))
    nbytes = sum(table.nbytes for table in vars(tables).values())
    assert nbytes == SHAPE[0] * form.side_table_bytes(*SHAPE[1:])


@each_format
def test_a_format_is_made_from_its_name_and_options(form: Format):
    assert make_format(form.name, **vars(form)) == form


def test_unknown_formats_and_options_are_refused():
    with pytest.raises(ValueError, match="'int4' is unknown; choose one of affine"):
        make_format("int4")
    with pytest.raises(ValueError, match="'codebook' has no option 'group_size'"):
        make_format("codebook", group_size=64)
