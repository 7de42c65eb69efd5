"""The routed experts in NumPy: float64, one token and one expert after the other."""

from typing import Literal

import numpy as np

from pallas_kernels.side_tables import AffineTables, RefinedTables, SideTables
from pallas_kernels.testing import LAYER, MoeProblem


def weights(
    codes: np.ndarray, parent_bits: int, bits: int, tables: SideTables, e: int
) -> np.ndarray:
    """Dequantises expert e's parent codes [n, k] at ``bits`` bits."""
    code = codes.astype(np.int64) >> (parent_bits - bits)
    n, k = code.shape
    if isinstance(tables, AffineTables):
        scale = np.asarray(tables.scale[LAYER, e], np.float64).T  # [n, groups]
        zero = np.asarray(tables.zero[LAYER, e], np.float64).T
        group = np.arange(k) // (k // scale.shape[1])
        return scale[:, group] * (code + 0.5) / 2**bits + zero[:, group]
    if isinstance(tables, RefinedTables):
        center = np.asarray(tables.center[LAYER, e], np.float64)  # [clusters, n]
        width = np.asarray(tables.width[LAYER, e], np.float64)
        cells = 2**bits // len(center)
        place = code // cells, np.arange(n)[:, None]
        rest = (code % cells + 0.5) / cells
        value = center[place] + width[place] * (rest - 0.5)
        return value.astype(np.float16).astype(np.float64)
    lut = np.asarray(tables.lut[LAYER, e], np.float64)
    seed_entries = 2 ** (parent_bits + 1) - lut.shape[1]
    return lut[np.arange(n)[:, None], 2**bits - seed_entries + code]


def activate(x: np.ndarray, name: Literal["silu", "gelu_tanh"]) -> np.ndarray:
    if name == "silu":
        return x / 2 * (1 + np.tanh(x / 2))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def routed_experts(
    problem: MoeProblem, activation: Literal["silu", "gelu_tanh"] = "silu"
) -> np.ndarray:
    parent_bits, f = problem.spec.parent_bits, problem.spec.expert_width
    x, out = np.asarray(problem.x, np.float64), np.zeros(problem.x.shape)
    ids, factors = np.asarray(problem.expert_ids), np.asarray(problem.expert_weights)
    bits = np.asarray(problem.bits[LAYER])
    for e in range(problem.spec.num_experts):
        if not np.any(ids == e):
            continue
        up = weights(
            problem.gate_up_codes[e], parent_bits, bits[e, 0], problem.gate_up, e
        )
        down = weights(problem.down_codes[e], parent_bits, bits[e, 1], problem.down, e)
        for t, k in zip(*np.nonzero(ids == e), strict=True):
            h = up @ x[t]
            h = activate(h[:f], activation) * h[f:]
            out[t] += factors[t, k] * (down @ h)
    return out
