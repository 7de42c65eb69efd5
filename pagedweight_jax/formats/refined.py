"""The refined format: a small codebook per row, and uniform levels in its clusters.

    weight_b = center[code_p] + width[code_p] * (rest - 1/2),    p = seed_bits

The first p bits of a code name one of 2**p clusters, as in the codebook format; every
further bit halves the cells of its cluster, as in the affine format. Levels are nested,
dense where the weights are, and one pair of small tables serves all numbers of bits.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float16, Float32, Integer, UInt8

from pagedweight_jax.formats import clusters, common, kmeans
from pallas_kernels.side_tables import RefinedTables, SideTables

_LLOYD_ITERATIONS = 50
_NUM_TURNS = 10
"""A hundred turns would gain 0.05 dB at the most over ten, on real weights."""


@dataclass(frozen=True, kw_only=True)
class RefinedFormat:
    """Clusters of each row with uniform nested levels inside.

    Attributes:
      seed_bits: bits that name a cluster, and bits of the lowest level: 3 or 4, since
        kernels keep the clusters of a row in registers.
      parent_bits: bits of the best level, and planes of a weight.
    """

    seed_bits: int = 3
    parent_bits: int = 6

    name: ClassVar[Literal["refined"]] = "refined"
    tables: ClassVar[type[RefinedTables]] = RefinedTables

    def __post_init__(self) -> None:
        common.check_bits(self.seed_bits, self.parent_bits)
        if self.seed_bits not in (3, 4):
            raise ValueError(
                f"seed_bits={self.seed_bits} name the clusters of a refined row and"
                " must be 3 or 4; choose another format for other numbers"
            )

    def side_table_bytes(self, n: int, k: int) -> int:
        """Returns the bytes of the side tables of one linear block ``[n, k]``."""
        del k
        return 4 * n * 2**self.seed_bits

    def max_error(self, bits: int) -> float:
        """Returns a bound of the error, in parts of the spread of a row.

        The root of the weighted mean square error of a row is at most this part of
        its largest minus its smallest weight. Reason: what is found is no worse than
        equal parts of the spread, where a weight is off by half a cell at most,
        2**-(b+1). The search adds the square errors of level b with weight 2**b, so
        the sum is at most the geometric one of equal parts, twice its first term; a
        level's share of it is largest when it has all.
        """
        common.check_level(bits, self.seed_bits, self.parent_bits)
        return 2.0**0.5 * 2.0 ** -(self.seed_bits + 1 + (bits - self.seed_bits) / 2)

    def quantize(
        self, weights: common.Weights, importance: common.Weights | None = None
    ) -> tuple[UInt8[np.ndarray, "*batch n k"], RefinedTables]:
        """Computes codes of ``parent_bits`` bits and the side tables.

        Args:
          weights: linear blocks.
          importance: what a squared error of each weight costs; None counts all
            alike, and so does a row without any importance.
        Returns:
          The codes, best for the weights given the side tables as float16 holds them,
          and the side tables in host memory.
        Raises:
          ValueError: see `common.weights_and_importance`.
        """
        *batch, n, k = weights.shape
        w, h = common.weights_and_importance(weights, importance)
        codes = np.empty(w.shape, np.uint8)
        center, width = np.empty((2, len(w), 2**self.seed_bits), np.float16)

        def one_block(block: slice) -> None:
            codes[block], center[block], width[block] = self._quantize_rows(
                w[block], h[block]
            )

        common.in_threads(one_block, len(w), k)
        parts = {
            name: values.reshape(*batch, n, -1).swapaxes(-1, -2)
            for name, values in (("center", center), ("width", width))
        }
        words = RefinedTables.from_parts(**parts).words
        tables = RefinedTables(words=common.host_array(np.asarray(words)))
        return codes.reshape(*batch, n, k), tables

    def _quantize_rows(
        self, w: Float32[np.ndarray, "rows k"], h: Float32[np.ndarray, "rows k"]
    ) -> tuple[
        UInt8[np.ndarray, "rows k"],
        Float16[np.ndarray, "rows clusters"],
        Float16[np.ndarray, "rows clusters"],
    ]:
        """Finds the clusters of a block of rows."""
        count = 2**self.seed_bits
        rows = kmeans.sort_rows(w, kmeans.positive(h))
        levels = clusters.Levels(
            cluster_bits=self.seed_bits, parent_bits=self.parent_bits
        )
        seed = kmeans.greedy_clusters(rows, count)
        seed = kmeans.lloyd(rows, seed, _LLOYD_ITERATIONS)
        best = clusters.improve(
            rows,
            levels,
            start=clusters.from_bounds(rows, seed),
            other=clusters.equal_parts(rows, count),
            num_turns=_NUM_TURNS,
        ).rounded()
        codes = kmeans.cluster_codes(rows, levels.bounds(rows, best))
        return codes, best.center.astype(np.float16), best.width.astype(np.float16)

    def dequantize(
        self,
        codes: Integer[Array | np.ndarray, "*batch n k"],
        tables: SideTables,
        bits: int,
    ) -> Float32[Array, "*batch n k"]:
        """Computes the weights of the first ``bits`` planes of parent codes."""
        common.check_level(bits, self.seed_bits, self.parent_bits)
        kept = common.kept_planes(codes, self.parent_bits, bits)
        return tables.weights(kept, jnp.int32(bits), self.parent_bits)
