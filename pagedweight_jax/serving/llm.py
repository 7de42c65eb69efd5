"""serve() and LLM: what users call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TypedDict

import jax
import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from pagedweight_jax.engine.engine import Engine, StepReport
from pagedweight_jax.engine.outputs import RequestOutput, request_output
from pagedweight_jax.engine.request import Request, SamplingParams
from pagedweight_jax.paging.migration import PlanRecord
from pagedweight_jax.paging.planner import PlannerLimits, Watermarks
from pagedweight_jax.serving.build import Built, build_engine
from pagedweight_jax.serving.load import LoadedModel, load_model
from pagedweight_jax.serving.options import (
    Dtype,
    KvCacheDtype,
    Policy,
    ServeOptions,
    resolve_model,
)


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes by kind; the parts add up to ``budget`` exactly.

    Attributes:
      planes: frames that hold expert planes or are reserved for planes on their way.
      side_tables: side tables of the paged experts.
      kv: frames that hold keys and values.
      dense: all other parameters.
      reserve: workspace of the steps, staging of migrations, rounding.
      free: frames that nobody holds.
    """

    budget: int
    planes: int
    side_tables: int
    kv: int
    dense: int
    reserve: int
    free: int


@dataclass(frozen=True, kw_only=True)
class EffectiveConfig:
    """What was decided where an option left it open."""

    model: str
    policy: Policy
    pin_bits: int | None
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    block_size: int
    seed: int
    num_frames: int
    frame_bytes: int
    kv_block_bytes: int


class LLM:
    """A model being served; use it as a context manager, or call `close`.

    One thread at a time: the engine has one pool, and a step gives it away.
    """

    def __init__(
        self, folder: Path, options: ServeOptions, model: LoadedModel, built: Built
    ) -> None:
        """Joins the parts; users call `serve`."""
        self._folder = folder
        self._options = options
        self._model = model
        self._built: Built | None = built
        self._num_requests = 0

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts; all run together as far as memory allows.

        Args:
          prompts: texts, or token ids as ``{"prompt_token_ids": [...]}``.
          sampling_params: for all prompts, or one for each; None for the defaults.
        Returns:
          One output a prompt, in their order.
        Raises:
          ValueError: if a prompt is empty or too long, or a list has another length;
            then nothing has started.
        """
        groups = self.submit(prompts, sampling_params)
        requests = [request for group in groups for request in group]
        try:
            while any(not request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                if not request.finished:
                    self.abort(request.request_id)
        return [self.output(group) for group in groups]

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[Request]]:
        """Queues prompts without waiting; call `step` until they are finished.

        Returns:
          For each prompt its continuations (``SamplingParams.n`` of them).
        Raises:
          ValueError: as `generate`.
        """
        if not isinstance(prompts, str | Mapping | Sequence):
            raise ValueError(f"prompts={prompts!r} is neither a prompt nor a list")
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _for_each(sampling_params, len(listed))
        tokens = [
            self._tokens(i, p, s)
            for i, (p, s) in enumerate(zip(listed, params, strict=True))
        ]
        groups = []
        for prompt, ids, param in zip(listed, tokens, params, strict=True):
            group = self._requests(prompt, ids, param)
            for request in group:
                self._engine.add(request)
            groups.append(group)
        return groups

    def step(self) -> StepReport:
        """Does one round of the engine.

        The tokens of the step that it enqueues are seen by a later call, unless
        ``max_steps_in_flight`` is 1.
        """
        return self._engine.step()

    def settle(self) -> None:
        """Waits until experts have the precision that idle memory allows."""
        self._engine.settle()

    def abort(self, request_id: str) -> bool:
        """Ends a request; returns whether it was there."""
        return self._engine.abort(request_id)

    def output(self, requests: Sequence[Request]) -> RequestOutput:
        """Returns what a prompt's continuations have come to so far."""
        name = requests[0].request_id.split("/")[0]
        return request_output(name, list(requests), self._model.tokenizer)

    def _tokens(self, index: int, prompt: Prompt, params: SamplingParams) -> list[int]:
        ids = self._encode(index, prompt)
        limit = self._running.max_model_len
        if not ids:
            raise ValueError(f"prompt {index} is empty; give at least one token")
        if len(ids) >= limit:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens but max_model_len={limit} must"
                " hold the prompt and at least one more; shorten it or raise"
                " max_model_len"
            )
        vocabulary = self._model.config.vocab_size
        wrong = [i for i in ids if not 0 <= i < vocabulary]
        if wrong:
            raise ValueError(
                f"prompt {index} has token ids {wrong[:5]} outside of the vocabulary"
                f" 0..{vocabulary - 1}"
            )
        if params.stop_texts and self._model.tokenizer is None:
            raise ValueError(
                f"stop={params.stop!r} needs a tokenizer, and {self._folder} has none;"
                " use stop_token_ids"
            )
        return ids

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str | Mapping):
            raise ValueError(
                f"prompt {index} is {prompt!r}; a prompt is a text or"
                " {'prompt_token_ids': [...]}"
            )
        if not isinstance(prompt, str):
            if set(prompt) != {"prompt_token_ids"}:
                raise ValueError(
                    f"prompt {index} has the keys {sorted(prompt)}; a prompt is a text"
                    " or {'prompt_token_ids': [...]}"
                )
            ids = prompt["prompt_token_ids"]
            wrong = [i for i in ids if not isinstance(i, Integral)]
            if wrong:
                raise ValueError(
                    f"prompt {index} has token ids {wrong[:5]!r} that are no integers"
                )
            return [int(i) for i in ids]
        if not prompt:
            raise ValueError(f"prompt {index} is empty; give a text")
        if self._model.tokenizer is None:
            raise ValueError(
                f"{self._folder} has no tokenizer.json; pass prompt_token_ids"
            )
        return self._model.tokenizer.encode(prompt).ids

    def _requests(
        self, prompt: Prompt, ids: list[int], params: SamplingParams
    ) -> list[Request]:
        room = self._running.max_model_len - len(ids)
        own_stops = () if params.ignore_eos else self._model.config.eos_token_ids
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if params.seed is None:
            seed = int(
                np.random.SeedSequence([self._options.seed, number]).generate_state(1)[
                    0
                ]
            )
        else:
            seed = params.seed
        return [
            Request(
                request_id=f"{number}/{i}",
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=ids,
                params=params,
                seed=(seed + i) % 2**32,
                max_tokens=min(room, params.max_tokens or room),
                stop_token_ids=frozenset((*own_stops, *(params.stop_token_ids or ()))),
            )
            for i in range(params.n)
        ]

    # Looking in

    @property
    def config(self) -> EffectiveConfig:
        """What is in effect."""
        built, options = self._running, self._options
        return EffectiveConfig(
            model=str(self._folder),
            policy=options.policy,
            pin_bits=options.pin_bits,
            dtype="bfloat16" if options.dtype == "auto" else options.dtype,
            kv_cache_dtype=built.kv.dtype,
            max_model_len=built.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_steps_in_flight=options.max_steps_in_flight,
            block_size=built.kv.block_size,
            seed=options.seed,
            num_frames=built.memory.pool.num_frames,
            frame_bytes=built.memory.pool.frame_bytes,
            kv_block_bytes=built.kv.block_bytes,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._model.tokenizer

    def memory_report(self) -> MemoryReport:
        """Returns the bytes by kind at this moment."""
        memory, allocator = self._running.memory, self._running.allocator
        frame = memory.pool.frame_bytes
        return MemoryReport(
            budget=memory.budget,
            planes=allocator.num_used("plane") * frame,
            side_tables=memory.side_table_bytes,
            kv=allocator.num_used("kv") * frame,
            dense=memory.dense_bytes,
            reserve=memory.reserve_bytes,
            free=allocator.num_free * frame,
        )

    def precision_map(self) -> Int32[np.ndarray, "L E 2"]:
        """Returns the committed bits of every page: layer, expert, gate_up and down.

        Raises:
          ValueError: if the experts are not paged.
        """
        migrator = self._running.migrator
        if migrator is None:
            raise ValueError(
                "policy='bf16' has no pages, so there is no precision map; serve a"
                " converted checkpoint with policy='pagedweight'"
            )
        return migrator.table.bits.copy()

    @property
    def mean_bits(self) -> float:
        """Committed bits of the average expert weight; 16 if they are not paged."""
        return self._engine.mean_bits

    def events(self) -> list[PlanRecord]:
        """Returns what became of each plan, oldest first."""
        migrator = self._running.migrator
        return [] if migrator is None else migrator.records

    def check_integrity(self) -> None:
        """Raises unless all ledgers agree."""
        self._engine.check_integrity()
        report = self.memory_report()
        parts = report.planes + report.side_tables + report.kv + report.dense
        parts += report.reserve + report.free
        if parts != report.budget:
            raise RuntimeError(f"the parts of {report} add up to {parts}")

    # Ending

    def close(self) -> None:
        """Ends all requests and returns all device memory; may be called twice."""
        if self._built is None:
            return
        self._built.engine.close()
        for leaf in jax.tree.leaves(self._model.params):
            leaf.delete()
        self._built = None

    @property
    def _running(self) -> Built:
        if self._built is None:
            raise RuntimeError("this LLM is closed; call serve() again")
        return self._built

    @property
    def _engine(self) -> Engine:
        return self._running.engine


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if count == 0:
        raise ValueError("no prompts came; give at least one")
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(
            f"{count} prompts came with {len(params)} sampling_params; give one for"
            " all, or one for each"
        )
    return list(params)


def serve(
    model: str | Path,
    *,
    memory_budget: int | str | None = None,
    gpu_memory_utilization: float = 0.9,
    policy: Policy = "pagedweight",
    pin_bits: int | None = None,
    expert_budget: int | str | None = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    max_steps_in_flight: int = 2,
    block_size: int = 16,
    seed: int = 0,
    limits: PlannerLimits | None = None,
    watermarks: Watermarks | None = None,
) -> LLM:
    """Loads a model, compiles its steps, and is ready to generate.

    Args:
      model: folder of a converted checkpoint; "demo" for the one in this package; or,
        with ``policy="bf16"``, a Hugging Face folder that is served as it is.
      memory_budget: bytes, or a text such as "48MiB", for everything on the device:
        weights, side tables, keys and values, workspace. None takes
        ``gpu_memory_utilization`` of the memory that is free.
      gpu_memory_utilization: see ``memory_budget``.
      policy: "pagedweight" lets experts give way to the KV cache; "bf16" keeps dense
        experts in the same engine.
      pin_bits: keep every page at so many bits; two runs are then identical.
      expert_budget: bytes of expert planes, or a text such as "12MiB": the planner
        spends them once, by the offline sensitivity, and then keeps every page as it
        is. Floors are the seed bits unless ``limits`` says otherwise.
      dtype: of parameters and activations that are not quantised; "auto" is bfloat16.
      kv_cache_dtype: how keys and values are stored: "auto" as ``dtype``, "bfloat16",
        or "fp8_e4m3" in half of its bytes (scale 1; beyond 448 it saturates).
      max_model_len: tokens of the longest sequence, prompt and output; None for what
        the model and the budget allow.
      max_num_seqs: requests that run at once.
      max_num_batched_tokens: prompt tokens that one step computes at most.
      max_steps_in_flight: steps that the device may have been given before the host
        has seen the tokens of the oldest; 1 waits for every step. Tokens are the same.
      block_size: tokens of a key-value block.
      seed: of requests that bring none.
      limits: floors and weights of the planner.
      watermarks: when to change precision.
    Returns:
      A running `LLM`.
    Raises:
      FileNotFoundError: if there is no such model or a file of it is missing.
      ValueError: if an option is wrong or has no effect, a file is damaged, or the
        budget is too small (the message names the smallest that works).
    """
    options = ServeOptions(
        memory_budget=memory_budget,
        gpu_memory_utilization=gpu_memory_utilization,
        policy=policy,
        pin_bits=pin_bits,
        expert_budget=expert_budget,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=max_steps_in_flight,
        block_size=block_size,
        seed=seed,
        limits=limits,
        watermarks=watermarks,
    )
    folder = resolve_model(model, policy)
    loaded = load_model(folder, options)
    return LLM(folder, options, loaded, build_engine(loaded, options))
