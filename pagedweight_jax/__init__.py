"""PagedWeight in JAX: experts give way to the KV cache, bit plane by bit plane."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedweight_jax.engine.outputs import RequestOutput as RequestOutput
    from pagedweight_jax.engine.request import SamplingParams as SamplingParams
    from pagedweight_jax.paging.planner import PlannerLimits as PlannerLimits
    from pagedweight_jax.paging.planner import Watermarks as Watermarks
    from pagedweight_jax.serving.llm import LLM as LLM
    from pagedweight_jax.serving.llm import serve as serve

_MENU = {
    "LLM": "pagedweight_jax.serving.llm",
    "PlannerLimits": "pagedweight_jax.paging.planner",
    "RequestOutput": "pagedweight_jax.engine.outputs",
    "SamplingParams": "pagedweight_jax.engine.request",
    "Watermarks": "pagedweight_jax.paging.planner",
    "serve": "pagedweight_jax.serving.llm",
}

__all__ = [
    "LLM",
    "PlannerLimits",
    "RequestOutput",
    "SamplingParams",
    "Watermarks",
    "serve",
]


def __getattr__(name: str) -> Any:
    """Imports what is asked for, so that `import pagedweight_jax` stays quick."""
    if name not in _MENU:
        raise AttributeError(f"pagedweight_jax has no {name!r}; it has {__all__}")
    from importlib import import_module

    return getattr(import_module(_MENU[name]), name)
