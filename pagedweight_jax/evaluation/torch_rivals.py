"""Times torch's bf16 experts: `python -m pagedweight_jax.evaluation.torch_rivals JSON`.

Runs in a process of its own, with no JAX in it, so that neither library sits on the
other's memory. Prints a list of times as JSON. Two rivals compute the same layer as
ours, from tokens and routing to the weighted sum:

    grouped_mm  sort by expert, torch._grouped_mm, act, torch._grouped_mm, add up
    loop        for each active expert two matmuls; the host knows the routing

The kernels' own times are from torch's profiler, which asks CUPTI as we do. A second
time is taken between two events around replays of a CUDA graph of several calls, gaps
included. Weights rotate between sets as our pages do.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

Tensor = Any

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """bf16 experts, weights as (out, in).

    Attributes:
      gate_up: ``[E, 2F, D]``.
      down: ``[E, D, F]``.
    """

    gate_up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]

    def hidden(self, gate_up: Tensor) -> Tensor:
        """Returns act(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up


def grouped_mm(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Computes the routed sum with two grouped matmuls."""
    top_k, num_experts = ids.shape[1], layer.down.shape[0]
    flat = ids.reshape(-1)
    order = torch.argsort(flat)
    tokens = order // top_k
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    both = torch._grouped_mm(x[tokens], layer.gate_up.transpose(1, 2), offs=ends)
    y = torch._grouped_mm(layer.hidden(both), layer.down.transpose(1, 2), offs=ends)
    y = y * weights.reshape(-1)[order, None]
    return torch.zeros_like(x).index_add_(0, tokens, y)


def loop(
    layer: Layer, x: Tensor, tokens_of: dict[int, tuple[Tensor, Tensor]]
) -> Tensor:
    """Computes the routed sum expert by expert.

    Args:
      layer: the experts.
      x: tokens.
      tokens_of: numbers of the tokens of each active expert, and their weights.
    """
    out = torch.zeros_like(x)
    for expert, (tokens, weights) in tokens_of.items():
        both = x[tokens] @ layer.gate_up[expert].T
        y = layer.hidden(both) @ layer.down[expert].T
        out.index_add_(0, tokens, y * weights[:, None])
    return out


def tokens_by_expert(ids: Tensor, weights: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Inverts the routing on the host."""
    result = {}
    for expert in ids.unique().tolist():
        tokens, choice = torch.nonzero(ids == expert, as_tuple=True)
        result[expert] = tokens, weights[tokens, choice]
    return result


@dataclass(frozen=True, kw_only=True)
class Times:
    """What one rival took for a call.

    Attributes:
      case: number of the routing.
      kernel_seconds: sum of the kernels' own times.
      kernels: launches.
      graph_seconds: with the gaps between kernels.
    """

    rival: str
    case: int
    kernel_seconds: float
    kernels: float
    graph_seconds: float


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Times both rivals for every routing of the request.

    Args:
      request: sizes ``width``, ``expert_width``, ``num_experts``, the name of the
        ``activation``, ``num_sets`` of weights, and ``cases``: experts
        ``[calls, T, top_k]``.
    """
    layers = [_random_layer(request, seed) for seed in range(request["num_sets"])]
    results = []
    for number, case in enumerate(request["cases"]):
        ids = torch.tensor(case, dtype=torch.int64, device="cuda")
        for name, call in _rivals(layers, ids).items():
            seconds, launches = _kernel_times(call, len(ids))
            times = Times(
                rival=f"torch {name} bf16",
                case=number,
                kernel_seconds=seconds,
                kernels=launches,
                graph_seconds=_graph_seconds(call, len(ids)),
            )
            results.append(asdict(times))
    return results


def _rivals(layers: list[Layer], ids: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """Returns both rivals as functions of the number of the call."""
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(ids.shape[1], layers[0].down.shape[1], **bf16)
    weights = torch.full(ids.shape[1:], 1 / ids.shape[2], **bf16)
    by_expert = [tokens_by_expert(i, weights) for i in ids]
    return {
        "grouped_mm": lambda i: grouped_mm(layers[i % len(layers)], x, ids[i], weights),
        "loop": lambda i: loop(layers[i % len(layers)], x, by_expert[i]),
    }


def _random_layer(request: dict[str, Any], seed: int) -> Layer:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def weights(*shape: int) -> Tensor:
        size = shape[-1] ** -0.5
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        return size * torch.randn(shape, generator=generator, **bf16)

    experts, width, inner = (
        request[name] for name in ("num_experts", "width", "expert_width")
    )
    return Layer(
        gate_up=weights(experts, 2 * inner, width),
        down=weights(experts, width, inner),
        activation=ACTIVATIONS[request["activation"]],
    )


def _kernel_times(call: Callable[[int], Tensor], calls: int) -> tuple[float, float]:
    """Returns seconds and launches of a call."""
    for i in range(min(2, calls)):
        call(i)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    events = profile.key_averages()
    seconds = 1e-6 * sum(event.self_device_time_total for event in events)
    return seconds / calls, sum(event.count for event in events) / calls


def _graph_seconds(
    call: Callable[[int], Tensor], calls: int, replays: int = 5
) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(i) for i in range(calls)]
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    del outputs
    return 1e-3 * start.elapsed_time(stop) / (replays * calls)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read()))))
