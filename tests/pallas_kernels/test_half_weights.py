"""The inline code that makes fp16 weights, executed by a warpgroup in NumPy."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import warpgroup
from jaxlib.mlir import ir
from warpgroup import Warpgroup

from pallas_kernels import bitplane
from pallas_kernels.fused_moe import fragments, half_weights, registers
from pallas_kernels.side_tables import AffineTables, RefinedTables

THREAD = np.arange(128)


@pytest.fixture(autouse=True)
def mlir():
    with ir.Context(), ir.Location.unknown():
        yield


def patch(monkeypatch, *memory):
    """Puts a warpgroup in the place of the modules that emit code."""
    group = Warpgroup(*memory)
    thread = THREAD.astype(np.uint32)
    modules = {
        "arith": SimpleNamespace(
            constant=constant,
            andi=lambda x, y: x & y,
            addi=lambda x, y: x + y,
            muli=lambda x, y: x * y,
            shrui=lambda x, y: x >> y,
            shli=lambda x, y: x << y,
            extui=lambda _, x: x.astype(np.uint64),
            index_cast=lambda _, x: x,
        ),
        "gpu": SimpleNamespace(
            thread_id=lambda _: thread, Dimension=SimpleNamespace(x=None)
        ),
        "llvm": SimpleNamespace(
            ptrtoint=lambda _, ref: np.full(128, ref.base, np.uint64)
        ),
        "vector": SimpleNamespace(
            from_elements=lambda _, parts: parts, extract=lambda v, _, at: v[at[0]]
        ),
        "utils": SimpleNamespace(
            memref_ptr=lambda ref: ref, inline_ptx=functools.partial(execute, group)
        ),
    }
    for module in (registers, fragments, half_weights):
        for name, fake in modules.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
    return group.memrefs


def constant(kind, attribute):
    if str(kind) == "i64":
        return np.full(128, attribute.value, np.uint64)
    return warpgroup._constant(kind, attribute)


def execute(group, code, *args, result_types, has_side_effects=False):
    del has_side_effects
    name = code.split()[0]
    if name == "mul.rn.f16x2":
        return warpgroup._packed(*warpgroup._halves(*args, f=lambda x, y: x * y))
    if name == "mov.b32" and len(args) == 1:
        return args[0]
    if name == "ld.global.nc.b16":
        return group._load(args[0], np.uint16, 1)[:, 0]
    if name.startswith("ld.global.nc.v"):
        return list(group._load(args[0], np.uint32, len(result_types)).T)
    return group.ptx(code, *args, result_types=result_types)


def matrix(values):
    """Arranges 16 A registers of every thread as the tile that they stand for."""
    out = np.full((64, 64), np.nan)
    row, column = 16 * (THREAD // 32) + THREAD % 32 // 4, 2 * (THREAD % 4)
    for s, register in enumerate(values):
        for hi in range(2):
            at = row + 8 * (s % 2), 8 * (s // 2) + column + hi
            out[at] = warpgroup._half(register, hi)
    return out


def tile(bits, order):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (64, 64))
    return rng, codes, list(np.asarray(bitplane.pack(codes, bits, order)))


@pytest.mark.parametrize(("v", "width"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_every_thread_loads_its_words_of_a_plane(v, width, monkeypatch):
    pool = np.arange(5 * 128 * v, dtype=np.uint32).reshape(5, 128 * v)
    (memory,) = patch(monkeypatch, pool.view(np.uint16))
    row, chunk, part = (np.full(128, x, np.uint32) for x in (1, 2, v // width - 1))
    address = half_weights._plane_address(memory, row, chunk, part, v=v, width=width)
    place = (address - np.uint64(memory.base)) // np.uint64(4)
    expected = pool[3].reshape(128, v)[:, v - width]
    np.testing.assert_array_equal(place, expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_become_integers(bits, monkeypatch):
    _, codes, planes = tile(bits, "split")
    patch(monkeypatch)
    integers = matrix(half_weights._integers(planes))
    np.testing.assert_array_equal(integers, codes - 2 ** (bits - 1))


@pytest.mark.parametrize("bits", range(1, 9))
def test_affine_weights_are_rounded_once_and_their_offset_once(bits, monkeypatch):
    rng, codes, planes = tile(bits, "split")
    scale = rng.uniform(0.01, 0.1, (1, 64)).astype(np.float16)
    zero = (-scale * rng.uniform(0.4, 0.6, (1, 64))).astype(np.float16)
    words = AffineTables.from_parts(scale=scale, zero=zero).words[0, 0]
    patch(monkeypatch)
    rows = words.reshape(4, 8, 1, 2).repeat(4, axis=2).reshape(128, 2).T
    lines = [half_weights._line(word, bits) for word in rows]
    weights = matrix(
        half_weights._fma(x, *lines[s % 2])
        for s, x in enumerate(half_weights._integers(planes))
    )
    scale, zero = scale.T.astype(np.float64), zero.T.astype(np.float64)
    expected = scale * (codes + 0.5) + zero * 2.0**bits
    offset = scale * (2 ** (bits - 1) + 0.5) + zero * 2.0**bits
    error = np.abs(weights - expected)
    assert np.all(error <= 2.0**-11 * (np.abs(expected) + np.abs(offset)))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_looked_up(bits, monkeypatch):
    rng, codes, planes = tile(bits, "pair")
    first = int(rng.integers(0, 40))
    lut = rng.standard_normal((64, first + 2**bits)).astype(np.float16)
    (memory,) = patch(monkeypatch, lut)
    weights = matrix(half_weights._looked_up(planes, memory, first))
    np.testing.assert_array_equal(
        weights, np.take_along_axis(lut, codes + first, axis=1)
    )


@pytest.mark.parametrize("bits", range(3, 9))
def test_refined_weights_are_exact(bits, monkeypatch):
    rng, codes, planes = tile(bits, "split")
    center = rng.standard_normal((8, 64)).astype(np.float16)
    width = rng.uniform(0.2, 1.0, (8, 64)).astype(np.float16)
    tables = RefinedTables.from_parts(center=center, width=width)
    clusters = np.asarray(half_weights.cluster_bytes(jnp.asarray(tables.words)))
    (memory,) = patch(monkeypatch, clusters[0].view(np.uint16))
    weights = matrix(half_weights._refined(planes, memory))
    np.testing.assert_array_equal(
        weights, tables.weights(jnp.asarray(codes), jnp.int32(bits), bits)
    )
