"""Where a key-value block lives: whole frames, filled row by row.

A *row* is the key and the value of one token in one layer, packed in uint32 words.
A *block* is ``block_size`` tokens of one sequence in all layers. Its rows follow each
other layer by layer and fill as many whole frames as they need:

    row  = layer * block_size + token % block_size
    frame = block_frames[row // rows_per_frame]
    word  = (row % rows_per_frame) * row_words

So a block is the only unit that is allocated, it is made of the same frames as expert
planes, and a freed block is at once free for planes: nothing fragments. What is left
over at the end of each frame and of the last frame is the waste.

float8_e4m3fn has 3 bits behind the point and a largest value of 448; keys and values
are stored as they are (scale 1), and what is larger becomes 448. A NaN stays a NaN.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

KvDtype = Literal["bfloat16", "float32", "float8_e4m3fn"]


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Static description of the key-value blocks of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: KvDtype
    frame_words: int

    def __post_init__(self) -> None:
        if self.row_words > self.frame_words:
            raise ValueError(
                f"one token's key and value in one layer take {self.row_words} words"
                f" but a frame has {self.frame_words}; choose larger frames"
            )

    @property
    def values_per_word(self) -> int:
        """Values packed in one uint32 word."""
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def row_words(self) -> int:
        """Words of the key and value of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim // self.values_per_word

    @property
    def rows_per_frame(self) -> int:
        """Rows that fit in one frame."""
        return self.frame_words // self.row_words

    @property
    def frames_per_block(self) -> int:
        """Frames of one block."""
        return -(-self.num_layers * self.block_size // self.rows_per_frame)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes from the pool (B_KV)."""
        return self.frames_per_block * self.frame_words * 4


def stored(x: Float[Array, "*shape"], dtype: KvDtype) -> Float[Array, "*shape"]:
    """Rounds keys or values as a block stores them; float8 saturates."""
    if dtype == "float8_e4m3fn":
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -limit, limit)
    return x.astype(dtype)


def pack_rows(
    k: Float[Array, "*batch kv_heads head_dim"],
    v: Float[Array, "*batch kv_heads head_dim"],
    layout: KvLayout,
) -> UInt32[Array, "*batch row_words"]:
    """Packs keys and values as rows: all of the key, then all of the value."""
    batch = k.shape[:-2]
    row = stored(jnp.stack([k, v], axis=-3), layout.dtype)
    row = row.reshape(*batch, layout.row_words, layout.values_per_word)
    if layout.values_per_word == 1:
        row = row[..., 0]
    return lax.bitcast_convert_type(row, jnp.uint32)


def unpack_rows(
    rows: UInt32[Array, "*batch row_words"], layout: KvLayout
) -> tuple[
    Float[Array, "*batch kv_heads head_dim"], Float[Array, "*batch kv_heads head_dim"]
]:
    """Unpacks rows into keys and values; the inverse of `pack_rows`."""
    values = lax.bitcast_convert_type(rows, jnp.dtype(layout.dtype))
    values = values.reshape(*rows.shape[:-1], 2, layout.num_kv_heads, layout.head_dim)
    return values[..., 0, :, :], values[..., 1, :, :]


def row_address(
    block_frames: Int32[Array, "*batch frames_per_block"],
    token_in_block: Int32[Array, "*batch"],
    layer: Int32[Array, ""] | int,
    layout: KvLayout,
) -> tuple[Int32[Array, "*batch"], Int32[Array, "*batch"]]:
    """Returns the frame and the first word of a token's row in a layer."""
    row = layer * layout.block_size + token_in_block
    frame = jnp.take_along_axis(
        block_frames, (row // layout.rows_per_frame)[..., None], axis=-1
    )[..., 0]
    return frame, (row % layout.rows_per_frame) * layout.row_words
