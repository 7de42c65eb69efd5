"""One MoE layer: from weights and calibration to planes and side tables, and back."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8, UInt32

from checkpoints_tools.calibrate import LayerStatistics
from pagedweight_jax.checkpoint import LayerPages
from pagedweight_jax.formats import Format
from pagedweight_jax.formats.common import host_array, on_host
from pallas_kernels import bitplane
from pallas_kernels.bitplane import BitOrder
from pallas_kernels.side_tables import SideTables

_WEIGHTS_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One number for every routed expert weight of one layer.

    ``gate_up`` has the rows of gate above the rows of up.
    """

    gate_up: Float32[np.ndarray, "E N D"]
    down: Float32[np.ndarray, "E D F"]

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.gate_up.size + self.down.size


@dataclass(frozen=True, kw_only=True)
class QuantizedLayer:
    """Parent codes of one layer with their side tables."""

    gate_up_codes: UInt8[np.ndarray, "E N D"]
    down_codes: UInt8[np.ndarray, "E D F"]
    gate_up: SideTables
    down: SideTables

    def weights(self, form: Format, bits: int) -> LayerWeights:
        """Computes the weights of a level."""
        dequantize = on_host(form.dequantize)
        return LayerWeights(
            gate_up=np.asarray(dequantize(self.gate_up_codes, self.gate_up, bits)),
            down=np.asarray(dequantize(self.down_codes, self.down, bits)),
        )


def layer_fisher(statistics: LayerStatistics) -> LayerWeights:
    """Returns the Fisher information of the expert weights of one layer.

    An expert that no calibration token visited has no gradient. It gets what half a
    token would have given an average expert of its layer, spread over the inputs as
    the squares of the layer's inputs are: it is cheap, but not free, and its planes
    are as good as if its inputs were the layer's.
    """
    half_token = 0.5 / max(float(statistics.tokens.mean()), 0.5)

    def block(fisher: np.ndarray, moments: np.ndarray) -> np.ndarray:
        inputs = moments.sum(axis=0)
        profile = inputs / inputs.mean() if inputs.any() else np.ones_like(inputs)
        unseen = (statistics.tokens == 0) | ~fisher.any(axis=(1, 2))
        stand_in = (fisher.mean() or 1.0) * half_token * profile
        filled = np.where(unseen[:, None, None], stand_in, fisher)
        return filled.astype(np.float32)

    return LayerWeights(
        gate_up=block(statistics.gate_up_fisher, statistics.gate_up_moments),
        down=block(statistics.down_fisher, statistics.down_moments),
    )


def quantize_layer(
    weights: LayerWeights,
    importance: LayerWeights,
    form: Format,
    advance: Callable[[int], None] = lambda weights: None,
) -> QuantizedLayer:
    """Computes parent codes and side tables of all experts of one layer.

    Args:
      importance: what a squared error of each weight costs.
      advance: is told the weights of each group of experts when it is done.
    """
    size = max(1, _WEIGHTS_AT_ONCE * len(weights.down) // weights.size)
    blocks: dict[str, list[tuple[np.ndarray, SideTables]]] = {"gate_up": [], "down": []}
    for start in range(0, len(weights.down), size):
        experts = slice(start, start + size)
        for name, done in blocks.items():
            part = getattr(weights, name)[experts]
            done.append(form.quantize(part, getattr(importance, name)[experts]))
            advance(part.size)

    def joined(name: str) -> tuple[np.ndarray, SideTables]:
        codes, tables = zip(*blocks[name], strict=True)
        whole = jax.tree.map(lambda *t: host_array(np.concatenate(t)), *tables)
        return np.concatenate(codes), whole

    gate_up_codes, gate_up = joined("gate_up")
    down_codes, down = joined("down")
    return QuantizedLayer(
        gate_up_codes=gate_up_codes, down_codes=down_codes, gate_up=gate_up, down=down
    )


def pack_layer(layer: QuantizedLayer, parent_bits: int) -> LayerPages:
    """Packs the planes of all experts, in the word order of their side tables."""
    experts, rows, width = layer.gate_up_codes.shape
    linears = layer.gate_up_codes.reshape(experts, 2, rows // 2, width)
    words = bitplane.plane_words(rows // 2, width)
    planes = np.empty((parent_bits, experts, 3, words), np.uint32)
    order = layer.gate_up.order
    for expert in range(experts):  # one at a time bounds the memory
        planes[:, expert, :2] = np.swapaxes(
            _pack(linears[expert], parent_bits, order), 0, 1
        )
        planes[:, expert, 2] = _pack(layer.down_codes[expert], parent_bits, order)
    return LayerPages(planes=list(planes), gate_up=layer.gate_up, down=layer.down)


def unpack_layer(pages: LayerPages) -> QuantizedLayer:
    """Unpacks the parent codes of one layer; the inverse of `pack_layer`."""
    planes = np.stack(pages.planes, axis=2)  # [E, 3, parent_bits, words]
    width, rows = pages.down.num_rows, pages.gate_up.num_rows
    order = pages.gate_up.order
    gate_up = [_unpack(p, rows // 2, width, order) for p in planes[:, :2]]
    down = [_unpack(p, width, rows // 2, order) for p in planes[:, 2]]
    return QuantizedLayer(
        gate_up_codes=np.stack(gate_up).reshape(-1, rows, width),
        down_codes=np.stack(down),
        gate_up=pages.gate_up,
        down=pages.down,
    )


_jit_pack = jax.jit(bitplane.pack, static_argnums=(1, 2))
_jit_unpack = jax.jit(bitplane.unpack, static_argnums=(1, 2, 3))


@on_host
def _pack(
    codes: UInt8[np.ndarray, "*batch n k"], bits: int, order: BitOrder
) -> UInt32[np.ndarray, "*batch {bits} words"]:
    return np.asarray(_jit_pack(jnp.asarray(codes), bits, order))


@on_host
def _unpack(
    planes: UInt32[Array | np.ndarray, "*batch bits words"],
    n: int,
    k: int,
    order: BitOrder,
) -> UInt8[np.ndarray, "*batch {n} {k}"]:
    return np.asarray(_jit_unpack(planes, n, k, order)).astype(np.uint8)
