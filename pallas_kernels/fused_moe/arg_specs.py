"""The shapes that matter, named after the models they come from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Static sizes of a layer of routed experts."""

    width: int  # D
    expert_width: int  # F
    num_experts: int  # E
    top_k: int
    group_size: int = 128  # columns that share an affine scale; must divide D and F
    parent_bits: int = 8
    seed_bits: int = 3  # fewest bits of codebook and refined
    frames_per_plane: int = 1


QWEN1_5_MOE_A2_7B = MoeSpec(width=2048, expert_width=1408, num_experts=60, top_k=4)
MIXTRAL_8X7B = MoeSpec(width=4096, expert_width=14336, num_experts=8, top_k=2)
GEMMA4_26B_A4B = MoeSpec(
    width=2816, expert_width=704, num_experts=128, top_k=8, group_size=64
)

MODELS = {
    "qwen1.5-moe-a2.7b": QWEN1_5_MOE_A2_7B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "gemma4-26b-a4b": GEMMA4_26B_A4B,
}
