"""The codebook format: a lookup table per row for every level of bits.

Any-Precision LLM (Park et al., 2024, arXiv 2402.10517): the seed level is a weighted
k-means of the row's weights (SqueezeLLM, arXiv 2306.07629, weighs by squared
gradients); every further bit splits each cluster in two, so that the code of b bits is
the prefix of the code of b + 1 bits.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float16, Float32, Integer, UInt8

from pagedweight_jax.formats import common, kmeans
from pallas_kernels.side_tables import CodebookTables, SideTables

_MAX_ITERATIONS = 50


@dataclass(frozen=True, kw_only=True)
class CodebookFormat:
    """Nested lookup tables, one set for each row.

    Attributes:
      seed_bits: bits of the k-means level, the lowest one.
      parent_bits: bits of the best level, and planes of a weight.
    """

    seed_bits: int = 3
    parent_bits: int = 6

    name: ClassVar[Literal["codebook"]] = "codebook"
    tables: ClassVar[type[CodebookTables]] = CodebookTables

    def __post_init__(self) -> None:
        common.check_bits(self.seed_bits, self.parent_bits)

    @property
    def entries(self) -> int:
        """Entries of the lookup tables of one row, all levels together."""
        return 2 ** (self.parent_bits + 1) - 2**self.seed_bits

    def side_table_bytes(self, n: int, k: int) -> int:
        """Returns the bytes of the side tables of one linear block ``[n, k]``."""
        del k
        return 2 * n * self.entries

    def max_error(self, bits: int) -> float:
        """Returns a bound of the error, in parts of the spread of a row.

        The root of the weighted mean square error of a row is at most this part of
        its largest minus its smallest weight. Reason: the first greedy cut is at
        least as good as a cut in the middle, which leaves a quarter of the spread at
        most on either side of the means. Later cuts only lower the error; how much
        depends on the row, so the bound is the same at every level.
        """
        common.check_level(bits, self.seed_bits, self.parent_bits)
        return 0.25

    def quantize(
        self, weights: common.Weights, importance: common.Weights | None = None
    ) -> tuple[UInt8[np.ndarray, "*batch n k"], CodebookTables]:
        """Computes codes of ``parent_bits`` bits and the lookup tables.

        Args:
          weights: linear blocks.
          importance: what a squared error of each weight costs; None counts all
            alike, and so does a row without any importance.
        Returns:
          The codes, and the side tables in host memory. A table entry that no code
          of its level names repeats a value of the row.
        Raises:
          ValueError: see `common.weights_and_importance`.
        """
        *batch, n, k = weights.shape
        w, h = common.weights_and_importance(weights, importance)
        codes = np.empty(w.shape, np.uint8)
        lut = np.empty((len(w), self.entries), np.float16)

        def one_block(block: slice) -> None:
            codes[block], lut[block] = self._quantize_rows(w[block], h[block])

        common.in_threads(one_block, len(w), k)
        tables = CodebookTables(lut=common.host_array(lut.reshape(*batch, n, -1)))
        return codes.reshape(*batch, n, k), tables

    def _quantize_rows(
        self, w: Float32[np.ndarray, "rows k"], h: Float32[np.ndarray, "rows k"]
    ) -> tuple[UInt8[np.ndarray, "rows k"], Float16[np.ndarray, "rows entries"]]:
        """Clusters a block of rows, level by level."""
        rows = kmeans.sort_rows(w, kmeans.positive(h))
        bounds = kmeans.greedy_clusters(rows, 2**self.seed_bits)
        bounds = kmeans.lloyd(rows, bounds, _MAX_ITERATIONS)
        last = np.repeat(rows.values[:, -1:], 2**self.seed_bits, axis=1)
        levels = [kmeans.cluster_means(rows, bounds, empty=last)]
        for _ in range(self.seed_bits, self.parent_bits):
            bounds = kmeans.split_all(rows, bounds)
            parents = np.repeat(levels[-1], 2, axis=1)
            levels.append(kmeans.cluster_means(rows, bounds, empty=parents))
        lut = np.concatenate(levels, axis=1).astype(np.float16)
        return kmeans.cluster_codes(rows, bounds), lut

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
