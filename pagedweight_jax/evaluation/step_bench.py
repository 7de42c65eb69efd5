"""How fast a whole decode step is: `pagedweight bench step`.

A model of full size with random weights decodes a batch with so many tokens cached,
through the engine's compiled programs: forward, commit of keys and values, sampling.
A row tells the time of a step on the wall, when steps are enqueued one after the other;
how much of it is not spent in kernels; and the bytes that must move, against what the
device reads at most.

With ``migration`` the same steps run while planes come and go at the full rate, and the
times of single steps are compared.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.engine.programs import Programs
from pagedweight_jax.evaluation import step_rows
from pagedweight_jax.evaluation.decode_loop import (
    DecodeLoop,
    compile_decode,
    pages_at,
    plan_memory,
    random_pool,
)
from pagedweight_jax.evaluation.device_timer import time_calls, wall_seconds
from pagedweight_jax.evaluation.expert_loop import ExpertLoop
from pagedweight_jax.evaluation.kernel_bench import read_ceiling
from pagedweight_jax.evaluation.migration_bench import MigrationRow, measure_migration
from pagedweight_jax.evaluation.provenance import provenance
from pagedweight_jax.evaluation.random_model import (
    CONFIGS,
    affine_tables,
    random_model,
)
from pagedweight_jax.evaluation.step_bytes import step_bytes
from pagedweight_jax.evaluation.step_rows import StepRow
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging.table import average_bits

PARENT_BITS = 6
_MIXED = ((3, 6), (0.4, 0.3, 0.2, 0.1))  # bits from 3 to 6, and how often: 4 on average
_COUNTED_STEPS = 4  # under the profiler
_FEWEST_STEPS = 4  # of a run on the wall
_RUN_SECONDS = 0.3  # a run of the longest steps need not last longer


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
      model: a name in `CONFIGS`.
      precisions: bits of all experts; "mixed" draws 3 to 6 for each page, 4 on average.
      steps: enqueued one after the other for one time on the wall, at most.
      migration: whether to measure single steps with and without planes on the move.
      migration_steps: of each kind.
      staging_frames: rows of a staging array.
    """

    model: str = "qwen1.5-moe-a2.7b"
    batches: tuple[int, ...] = (1, 4, 16, 32)
    contexts: tuple[int, ...] = (2048, 8192 - 1)
    precisions: tuple[str, ...] = ("bf16", "3", "4", "6", "mixed")
    steps: int = 40
    migration: bool = True
    migration_steps: int = 400
    staging_frames: int = 256

    def __post_init__(self) -> None:
        if self.model not in CONFIGS:
            raise ValueError(f"model {self.model!r} is unknown; there are {[*CONFIGS]}")
        known = ["bf16", "3", "4", "5", "6", "mixed"]
        if unknown := [p for p in self.precisions if p not in known]:
            raise ValueError(f"precisions {unknown} are unknown; there are {known}")
        longest = CONFIGS[self.model].max_position_embeddings
        if not 0 < max(self.contexts) < longest or min(self.batches) < 1:
            raise ValueError(
                f"contexts={self.contexts} must be from 1 to {longest - 1} and"
                f" batches={self.batches} positive"
            )

    @property
    def command(self) -> str:
        """What to type to measure the same again."""
        lists = {
            "batch": self.batches,
            "context": self.contexts,
            "precision": self.precisions,
        }
        flags = [f"--{k}={','.join(map(str, v))}" for k, v in lists.items()]
        flags += [f"--model={self.model}", f"--steps={self.steps}"]
        flags += [f"--staging_frames={self.staging_frames}"]
        flags += [f"--migration_steps={self.migration_steps}"] * self.migration
        flags += ["--nomigration"] * (not self.migration)
        return " ".join(["pagedweight bench step", *flags])


def run(options: Options) -> dict[str, Any]:
    """Measures, prints a row a line, and returns the result, ready for JSON."""
    start = time.perf_counter()
    ceiling = read_ceiling()
    print(f"read ceiling {ceiling / 1e9:.0f} GB/s\n{step_rows.HEADER}", flush=True)
    rows: list[StepRow] = []
    moving: list[MigrationRow] = []
    for paged in (True, False):
        chosen = [p for p in options.precisions if (p != "bf16") == paged]
        if not chosen:
            continue
        bench = StepBench(options, paged=paged, ceiling=ceiling)
        for row in bench.rows(chosen):
            print(step_rows.line(row), flush=True)
            rows.append(row)
        if paged and options.migration:
            print(step_rows.MIGRATION_HEADER)
            for row in bench.migration():
                print(step_rows.migration_line(row), flush=True)
                moving.append(row)
        bench.delete()
    checks = list(step_rows.checks(rows, moving))
    print(*checks, sep="\n")
    seconds = time.perf_counter() - start
    print(f"took {seconds:.0f} s")
    return {
        "benchmark": "step",
        "command": options.command,
        "model": options.model,
        "ceiling_bytes_per_second": ceiling,
        "bench_seconds": seconds,
        "rows": [step_rows.as_json(row) for row in rows],
        "migration": [{**asdict(m), "p99_ratio": m.p99_ratio} for m in moving],
        "checks": [{**asdict(check), "met": check.met} for check in checks],
        "measured_with": provenance(),
    }


class StepBench:
    """A model with its pool, and compiled programs for every batch."""

    def __init__(self, options: Options, *, paged: bool, ceiling: float) -> None:
        self._options = options
        self._ceiling = ceiling
        config = CONFIGS[options.model]
        self._model = random_model(config, affine_tables(config) if paged else None)
        self._memory = plan_memory(
            config,
            PARENT_BITS if paged else 0,
            max(options.batches),
            max(options.contexts) + 1,
        )
        self._pool = random_pool(self._memory)
        self._experts = ExpertLoop(self._model)
        self._programs = self._compile()

    def _compile(self) -> dict[int, Programs]:
        """Compiles all batches side by side; most of it runs outside of Python."""

        def programs(batch: int) -> Programs:
            staging = self._options.staging_frames
            return compile_decode(self._model, self._memory, batch, staging)

        with ThreadPoolExecutor() as pool:
            done = pool.map(programs, self._options.batches)
            return dict(zip(self._options.batches, done, strict=True))

    def rows(self, precisions: Sequence[str]) -> Iterator[StepRow]:
        """Measures every batch and context at every precision."""
        for context in self._options.contexts:
            for batch in self._options.batches:
                for precision in precisions:
                    yield self._row(precision, batch, context)

    def _row(self, precision: str, batch: int, context: int) -> StepRow:
        bits = bits_of(self._model.config, precision)
        loop = self._loop(batch, context, bits)
        results = loop.results(loop.step())
        seconds = self._wall_seconds(loop)
        times = time_calls(lambda _: loop.step(), _COUNTED_STEPS, warmup=1)
        self._pool = loop.pool
        routed = np.asarray(results.routing.tokens)
        return StepRow(
            precision=precision,
            mean_bits=16.0 if bits is None else average_bits(bits),
            batch=batch,
            context=context,
            seconds=seconds,
            kernel_seconds=times.median,
            kernels=times.kernels,
            num_layers=self._model.config.num_layers,
            experts_seconds=self._experts_seconds(batch, loop.pages),
            active_experts=float((routed > 0).sum(axis=1).mean()),
            bytes=step_bytes(
                self._model,
                self._memory.kv,
                routed,
                bits,
                num_rows=batch,
                context=context,
            ),
            ceiling=self._ceiling,
        )

    def _wall_seconds(self, loop: DecodeLoop) -> float:
        """Times a long run of steps, each enqueued behind the last one."""

        def run(steps: int) -> Array:
            return [loop.step() for _ in range(steps)][-1]

        few = wall_seconds(lambda: run(_FEWEST_STEPS), 1) / _FEWEST_STEPS
        steps = min(self._options.steps, max(_FEWEST_STEPS, int(_RUN_SECONDS / few)))
        return wall_seconds(lambda: run(steps)) / steps

    def _experts_seconds(self, batch: int, pages: Pages | None) -> float:
        call = self._experts.calls(self._pool, pages, batch)
        return time_calls(call, _COUNTED_STEPS, warmup=1).median

    def _loop(
        self, batch: int, context: int, bits: Int32[np.ndarray, "L E 2"] | None
    ) -> DecodeLoop:
        pages = None if bits is None else pages_at(self._memory, bits)
        programs = self._programs[batch]
        return DecodeLoop(
            self._model, programs, self._memory, self._pool, pages, context
        )

    def migration(self) -> Iterator[MigrationRow]:
        """Measures single steps while no plane moves, and while planes do."""
        context = min(self._options.contexts)
        for batch in self._options.batches:
            bits = bits_of(self._model.config, str(PARENT_BITS))
            loop = self._loop(batch, context, bits)
            yield measure_migration(
                loop,
                self._memory,
                batch=batch,
                context=context,
                steps=self._options.migration_steps,
                staging_frames=self._options.staging_frames,
            )
            self._pool = loop.pool

    def delete(self) -> None:
        """Frees the memory of the device."""
        self._pool.delete()
        for leaf in jax.tree.leaves(self._model.params):
            leaf.delete()


def bits_of(config: ModelConfig, precision: str) -> Int32[np.ndarray, "L E 2"] | None:
    """Returns the bits of every page; None for matrices."""
    shape = (config.num_moe_layers, config.num_experts, 2)
    if precision == "bf16":
        return None
    if precision != "mixed":
        return np.full(shape, int(precision), np.int32)
    (low, high), shares = _MIXED
    levels = np.arange(low, high + 1, dtype=np.int32)
    return np.random.default_rng(0).choice(levels, shape, p=shares)
