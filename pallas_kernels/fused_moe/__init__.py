"""Fused mixed-precision MoE: routed experts read from bit planes in a paged pool."""

from pallas_kernels.fused_moe.api import fused_moe as fused_moe
