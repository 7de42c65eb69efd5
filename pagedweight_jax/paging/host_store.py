"""All planes in host memory: where a dropped plane comes back from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt32

from pagedweight_jax.paging.table import LINEARS_OF_BLOCK, PlaneId

HostPlane = UInt32[np.ndarray, "E 3 plane_words"]


@dataclass(frozen=True, eq=False)
class HostStore:
    """The planes of all experts.

    Attributes:
      planes: ``planes[layer][j]`` is plane ``j`` (0 is the most significant) of the
        linears gate, up and down of every expert. The arrays may be memory-mapped:
        nothing is read before it is asked for.
    """

    planes: Sequence[Sequence[HostPlane]]

    def __post_init__(self) -> None:
        if not self.planes or not self.planes[0]:
            raise ValueError("a host store needs at least one layer with one plane")
        wanted = (self.parent_bits, self.planes[0][0].shape)
        for layer, planes in enumerate(self.planes):
            shapes = {plane.shape for plane in planes}
            if (len(planes), shapes) != (wanted[0], {wanted[1]}):
                raise ValueError(
                    f"layer {layer} has {len(planes)} planes of shapes"
                    f" {sorted(shapes)} but layer 0 has {wanted[0]} planes, the first"
                    f" {wanted[1]}; all must be alike"
                )

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.planes)

    @property
    def parent_bits(self) -> int:
        """Planes of each linear."""
        return len(self.planes[0])

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return self.planes[0][0].shape[0]

    @property
    def plane_words(self) -> int:
        """Words of one plane of one linear."""
        return self.planes[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for layer in self.planes for plane in layer)

    def read(self, plane: PlaneId, out: UInt32[np.ndarray, "frames words"]) -> None:
        """Copies the frames of one plane, those of gate before those of up.

        Args:
          plane: the plane to copy.
          out: the rows to fill, one a frame.
        Raises:
          ValueError: if ``out`` is not as large as the plane.
        """
        linears = LINEARS_OF_BLOCK[plane.block]
        source = self.planes[plane.layer][plane.plane][plane.expert, linears]
        if out.size != source.size:
            raise ValueError(
                f"{plane} has {source.size} words but out is {out.shape}; give"
                f" {source.size} / frame_words rows"
            )
        np.copyto(out, source.reshape(out.shape))
