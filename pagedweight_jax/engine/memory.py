"""Where the bytes of a budget go, decided once at the start."""

import os
import re
from dataclasses import dataclass

import jax

from pagedweight_jax.engine.step import StepShape
from pagedweight_jax.paging.pool import PoolLayout
from pallas_kernels.paged_attention import KvLayout

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


def parse_bytes(text: str | int) -> int:
    """Reads a number of bytes, or a text such as "48MiB" or "1.5 GB".

    Raises:
      ValueError: if the unit is unknown or the number is not positive.
    """
    if isinstance(text, int):
        amount, unit = float(text), ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
        if not match or match[2] not in _UNITS:
            raise ValueError(
                f"memory budget {text!r} is not a size; write bytes or a number with"
                f" one of {', '.join(u for u in _UNITS if u)}, for example '48MiB'"
            )
        amount, unit = float(match[1]), match[2]
    if amount <= 0:
        raise ValueError(f"memory budget {text!r} must be positive")
    return int(amount * _UNITS[unit])


def format_bytes(count: float) -> str:
    """Writes a number of bytes in MiB."""
    return f"{count / 2**20:.1f}MiB"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What must fit beside the pool, and what the pool must hold at the least.

    Attributes:
      dense_bytes: parameters that are not paged.
      side_table_bytes: side tables of the paged experts.
      reserve_bytes: workspace of the compiled steps and staging of migrations.
      plane_frames: frames of the planes at the lowest precision that may be needed.
      kv_frames: frames of the longest sequence.
    """

    dense_bytes: int
    side_table_bytes: int
    reserve_bytes: int
    plane_frames: int
    kv_frames: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A budget, split; what is left over by rounding counts as reserve."""

    budget: int
    dense_bytes: int
    side_table_bytes: int
    pool: PoolLayout

    @property
    def reserve_bytes(self) -> int:
        """Workspace, staging, the null frame and what rounding left over."""
        usable = self.pool.num_bytes - self.pool.frame_bytes
        return self.budget - self.dense_bytes - self.side_table_bytes - usable


def smallest_budget(needs: Needs, frame_bytes: int) -> int:
    """Returns the smallest budget that works: floors, one sequence, one null frame."""
    frames = 1 + needs.plane_frames + needs.kv_frames
    fixed = needs.dense_bytes + needs.side_table_bytes + needs.reserve_bytes
    return fixed + frames * frame_bytes


def plan_memory(
    budget: int, needs: Needs, *, frame_words: int, frames_per_plane: int
) -> MemoryPlan:
    """Gives the pool all frames that the budget has room for.

    Raises:
      ValueError: if the budget is too small; the message names the smallest one.
    """
    frame_bytes = 4 * frame_words
    smallest = smallest_budget(needs, frame_bytes)
    if budget < smallest:
        raise ValueError(
            f"memory_budget is {budget} bytes ({format_bytes(budget)}) but this model"
            f" needs at least {smallest} bytes ({format_bytes(smallest)}): dense"
            f" weights {format_bytes(needs.dense_bytes)}, side tables"
            f" {format_bytes(needs.side_table_bytes)}, planes at their floors"
            f" {format_bytes(needs.plane_frames * frame_bytes)}, one sequence of"
            f" max_model_len {format_bytes(needs.kv_frames * frame_bytes)}, reserve"
            f" {format_bytes(needs.reserve_bytes)}; raise memory_budget, or lower"
            " max_model_len or max_num_batched_tokens"
        )
    fixed = needs.dense_bytes + needs.side_table_bytes + needs.reserve_bytes
    pool = PoolLayout(
        num_frames=(budget - fixed) // frame_bytes,
        frame_words=frame_words,
        frames_per_plane=frames_per_plane,
    )
    return MemoryPlan(
        budget=budget,
        dense_bytes=needs.dense_bytes,
        side_table_bytes=needs.side_table_bytes,
        pool=pool,
    )


def device_memory_bytes() -> int:
    """Returns the memory of the default device that is not in use.

    On the CPU that is the memory of the machine that the system calls available.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def step_workspace_bytes(
    shape: StepShape,
    kv: KvLayout,
    *,
    hidden_size: int,
    inner_size: int,
    vocab_size: int,
    weight_bytes: int,
) -> int:
    """Bounds the bytes that one step needs beside parameters and pool.

    A step holds, at one time or another: a few float32 copies of the token stream and
    of the widest inner activation, of the logits of the sampled rows, of one chunk of
    keys and values per row (as stored and in float32), and twice the fresh rows. The
    engine checks the bound against what XLA reports for the compiled steps.

    Args:
      shape: the largest bucket.
      kv: layout of the key-value blocks.
      hidden_size: width of the token stream.
      inner_size: widest activation between two linears.
      vocab_size: width of the logits.
      weight_bytes: weights that a step holds a second time, or in another form.
    """
    chunk = 128
    stream = 4 * shape.num_tokens * (4 * hidden_size + 2 * inner_size)
    logits = 4 * 3 * max(32, shape.num_rows) * vocab_size
    keys = max(r * (chunk + q) for r, q in shape.groups) * kv.row_words
    keys *= 4 * (1 + kv.values_per_word)
    fresh = 2 * 4 * kv.num_layers * shape.num_tokens * kv.row_words
    return stream + logits + keys + fresh + weight_bytes
