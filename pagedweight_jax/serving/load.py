"""From a folder to a model in memory: parameters on the device, planes on the host."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from checkpoints_tools.huggingface import load_parameters
from pagedweight_jax.checkpoint import Checkpoint, open_checkpoint
from pagedweight_jax.config import ModelConfig, read_config
from pagedweight_jax.engine.step import Params
from pagedweight_jax.models.moe import SideTableShapes
from pagedweight_jax.models.qwen2_moe import Qwen2Moe, layer_runs
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.sensitivity import Sensitivity
from pagedweight_jax.serving.options import ServeOptions
from pallas_kernels.side_tables import AffineTables


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in memory; ``pages`` is what the pool will be filled from."""

    config: ModelConfig
    graphdef: nnx.GraphDef[Qwen2Moe]
    params: Params
    tokenizer: Tokenizer | None
    pages: HostStore | None = None
    sensitivity: Sensitivity | None = None

    @property
    def side_table_bytes(self) -> int:
        """Bytes of the paged experts' side tables."""
        return sum(a.nbytes for path, a in self._leaves() if "experts" in path)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all other parameters; experts that are not paged included."""
        total = sum(a.nbytes for _, a in self._leaves())
        return total if self.pages is None else total - self.side_table_bytes

    def _leaves(self) -> list[tuple[str, jax.Array]]:
        leaves = jax.tree.leaves_with_path(self.params)
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def load_model(folder: Path, options: ServeOptions) -> LoadedModel:
    """Loads a converted checkpoint, or (policy "bf16") a Hugging Face folder."""
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    if options.policy == "bf16":
        config = read_config(folder)
        tree = load_parameters(folder, dtype)
        file = folder / "tokenizer.json"
        return LoadedModel(
            config=config,
            tokenizer=Tokenizer.from_file(str(file)) if file.is_file() else None,
            **_with_parameters(config, None, tree, dtype),
        )
    checkpoint = open_checkpoint(folder)
    layers = [checkpoint.layer(i) for i in range(checkpoint.config.num_moe_layers)]
    tree = checkpoint.dense()
    first = 0
    for run, (routed, length) in enumerate(layer_runs(checkpoint.config)):
        if routed:
            part = layers[first : first + length]
            tree["runs"][run]["mlp"]["experts"] = {
                "gate_up": jax.tree.map(_stack, *[p.gate_up for p in part]),
                "down": jax.tree.map(_stack, *[p.down for p in part]),
            }
            first += length
    return LoadedModel(
        config=checkpoint.config,
        tokenizer=Tokenizer.from_file(str(checkpoint.tokenizer_file)),
        pages=HostStore([layer.planes for layer in layers]),
        sensitivity=checkpoint.sensitivity(),
        **_with_parameters(checkpoint.config, _table_shapes(checkpoint), tree, dtype),
    )


def _stack(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays)


def _table_shapes(checkpoint: Checkpoint) -> SideTableShapes:
    config, form = checkpoint.config, checkpoint.format
    layer = checkpoint.layer(0)
    group_size = (0, 0)
    if isinstance(layer.gate_up, AffineTables) and isinstance(layer.down, AffineTables):
        group_size = (
            config.hidden_size // layer.gate_up.num_groups,
            config.expert_width // layer.down.num_groups,
        )
    return SideTableShapes(
        format=form.name,
        parent_bits=form.parent_bits,
        seed_bits=form.seed_bits,
        group_size=group_size,
    )


def _with_parameters(
    config: ModelConfig, tables: SideTableShapes | None, tree: dict, dtype: str
) -> dict:
    """Builds the model's structure and puts the parameters on the device."""
    kind = jnp.dtype(dtype)
    abstract = nnx.eval_shape(
        lambda: Qwen2Moe(config, tables=tables, dtype=kind, rngs=nnx.Rngs(0))
    )
    graphdef, state = nnx.split(abstract)

    def place(want: jax.ShapeDtypeStruct, have: np.ndarray) -> jax.Array:
        assert want.shape == have.shape, f"{want} came as {have.shape}"
        return jnp.asarray(have, want.dtype)

    placed = jax.tree.map(place, nnx.to_pure_dict(state), tree)
    nnx.replace_by_pure_dict(state, placed)
    return {"graphdef": graphdef, "params": state}
