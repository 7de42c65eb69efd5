"""Paged attention: keys and values in frames of the pool, and the step's fresh ones."""

from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.layout import KvLayout as KvLayout
from pallas_kernels.paged_attention.rows import Rows as Rows
