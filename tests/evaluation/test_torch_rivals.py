import pytest

torch = pytest.importorskip("torch")

from pagedweight_jax.evaluation import torch_rivals  # noqa: E402


def test_both_rivals_compute_the_same_layer():
    torch.manual_seed(0)
    experts, width, inner, tokens, top_k = 6, 64, 128, 5, 2
    layer = torch_rivals.Layer(
        gate_up=torch.randn(experts, 2 * inner, width).bfloat16() / 8,
        down=torch.randn(experts, width, inner).bfloat16() / 8,
        activation=torch_rivals.ACTIVATIONS["silu"],
    )
    x = torch.randn(tokens, width).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k).bfloat16()
    grouped = torch_rivals.grouped_mm(layer, x, ids, weights)
    by_expert = torch_rivals.tokens_by_expert(ids, weights)
    one_by_one = torch_rivals.loop(layer, x, by_expert)
    torch.testing.assert_close(grouped, one_by_one, rtol=0.02, atol=0.02)
    expected = sum(
        weights[:, k, None].float()
        * torch.stack(
            [
                layer.down[e].float()
                @ layer.hidden(layer.gate_up[e].float() @ x[t].float())
                for t, e in enumerate(ids[:, k].tolist())
            ]
        )
        for k in range(top_k)
    )
    torch.testing.assert_close(grouped.float(), expected, rtol=0.05, atol=0.1)
