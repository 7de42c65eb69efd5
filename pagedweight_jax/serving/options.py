"""What serve() takes, checked before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagedweight_jax.checkpoint import is_checkpoint
from pagedweight_jax.paging.planner import PlannerLimits, Watermarks

Policy = Literal["pagedweight", "bf16"]
Dtype = Literal["auto", "float32", "bfloat16"]
KvCacheDtype = Literal["auto", "bfloat16", "fp8_e4m3"]

DEMO_CHECKPOINT = Path(__file__).parents[1] / "demo" / "checkpoint"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `serve`; see there.

    ``kv_cache_dtype`` is how keys and values are stored: "auto" as the model computes
    them, "fp8_e4m3" in half the bytes of bfloat16 (scale 1; beyond 448 it saturates).

    Every option either changes what is reported as the effective configuration, or is
    refused.
    """

    memory_budget: int | str | None = None
    gpu_memory_utilization: float = 0.9
    policy: Policy = "pagedweight"
    pin_bits: int | None = None
    expert_budget: int | str | None = None
    dtype: Dtype = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_steps_in_flight: int = 2
    block_size: int = 16
    seed: int = 0
    limits: PlannerLimits | None = None
    watermarks: Watermarks | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_steps_in_flight",
            "block_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len={self.max_model_len} must be at least 2: a prompt"
                " token and a generated one"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0"
                " and at most 1"
            )
        self._check_effects()

    def _check_choices(self) -> None:
        for name, choices in (
            ("policy", ("pagedweight", "bf16")),
            ("dtype", ("auto", "float32", "bfloat16")),
            ("kv_cache_dtype", ("auto", "bfloat16", "fp8_e4m3")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of"
                    f" {', '.join(choices)}"
                )

    def _check_effects(self) -> None:
        """Refuses options that would have no effect."""
        default = type(self).__dataclass_fields__["gpu_memory_utilization"].default
        if self.memory_budget is not None and self.gpu_memory_utilization != default:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} has no effect"
                f" beside memory_budget={self.memory_budget!r}; give one of them"
            )
        for name in ("pin_bits", "expert_budget", "limits", "watermarks"):
            if self.policy == "bf16" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with policy='bf16',"
                    " whose experts are not paged; drop it or use"
                    " policy='pagedweight'"
                )
        for fixed, useless in (
            ("pin_bits", ("expert_budget", "limits", "watermarks")),
            ("expert_budget", ("watermarks",)),
        ):
            for name in useless:
                if getattr(self, fixed) is not None and getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no effect with {fixed}={getattr(self, fixed)!r},"
                        " which fixes the precision; drop one of them"
                    )


def resolve_model(model: str | Path, policy: Policy) -> Path:
    """Returns the folder to serve.

    Raises:
      FileNotFoundError: if there is no such folder, or nothing to serve in it.
      ValueError: if folder and policy do not fit each other.
    """
    folder = DEMO_CHECKPOINT if str(model) == "demo" else Path(model)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"model {str(model)!r} is neither 'demo' nor a folder; give the folder of"
            " a converted checkpoint (`pagedweight convert`)"
        )
    if is_checkpoint(folder):
        if policy == "bf16":
            raise ValueError(
                f"{folder} holds quantised experts, but policy='bf16' serves a Hugging"
                " Face folder as it is; give that folder, or drop the policy"
            )
        return folder
    if policy == "pagedweight":
        raise ValueError(
            f"{folder} is not a converted checkpoint; run `pagedweight convert"
            f" --hf_dir={folder} --output=DIR --calibration=FILE.jsonl` and serve DIR,"
            " or serve it as it is with policy='bf16'"
        )
    return folder
