"""A model read from its checkpoint directory and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from tlm_jax.capacity.profile import Profile
from tlm_jax.checkpoint.layout import PARAMETERS_DTYPE, WEIGHTS_ONLY
from tlm_jax.checkpoint.restore import find_checkpoint, read_metadata, restore_parameters
from tlm_jax.checkpoint.retention import weights_to_read
from tlm_jax.config import from_json
from tlm_jax.data.tokenizer import Tokenizer, tokenizer_from_bytes
from tlm_jax.model.functional import FunctionalDecoder, Parameters
from tlm_jax.model.settings import ModelSettings, settings_from_config
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import parameter_shardings

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Checkpointed:
    """What a checkpoint says, before any of its arrays is read.

    Attributes:
      path: the step's directory.
      config: the run's config, as it was resolved.
      profile, tokenizer: the run's.
      settings: of the model for the devices at hand, without what only training needs.
      parameters_dtype: the precision of the stored weights: float32, or what an export rounded them to.
      weights: which of `checkpoint.layout.WEIGHTS` to restore.
      exported_weights: which of them an export's are; None: it is no export.
    """

    path: Path
    config: ConfigDict
    profile: Profile
    tokenizer: Tokenizer
    settings: ModelSettings
    parameters_dtype: str
    weights: str
    exported_weights: str | None

    @property
    def step(self) -> int:
        """The training step it was saved at."""
        return int(self.path.name)


def read_checkpoint(
    checkpoint: str | Path, step: int | str | None = None, dtype: str | None = None, weights: str | None = None
) -> Checkpointed:
    """Reads everything but the arrays.

    The attention kernel is chosen for the devices at hand, whatever the run was trained with.

    Args:
      checkpoint: a workdir, its `checkpoints` folder, or a step's directory.
      step: which step, or "best" by validation; the latest by default.
      dtype: one of `DTYPES` to compute in; by default the run's choice, where "auto" goes by the devices at hand.
      weights: one of `checkpoint.layout.WEIGHTS`; by default as `weights_to_read` has it.

    Raises:
      UserError: no such checkpoint, or it is damaged.
    """
    path = find_checkpoint(checkpoint, step)
    metadata = read_metadata(path)
    config = from_json(metadata.config, where=f"{path}: config")
    adapted = config.copy_and_resolve_references()
    adapted.model.attention = "auto"
    adapted.model.remat = "none"
    adapted.model.compute_dtype = dtype or config.model.compute_dtype
    return Checkpointed(
        path=path,
        config=config,
        profile=Profile.from_json(metadata.profile, where=f"{path}: profile"),
        tokenizer=tokenizer_from_bytes(metadata.tokenizer_kind, metadata.tokenizer, where=f"{path}: tokenizer"),
        settings=settings_from_config(adapted),
        parameters_dtype=metadata.extra.get(PARAMETERS_DTYPE, "float32"),
        weights=weights_to_read(path, step, weights),
        exported_weights=metadata.extra.get(WEIGHTS_ONLY),
    )


def load_model(source: Checkpointed, axis: str) -> tuple[FunctionalDecoder, Parameters, Mesh]:
    """Restores the parameters onto a mesh of all devices along one axis.

    Args:
      axis: "fsdp" cuts the weights into as many parts as there are devices; "data" copies them to each.

    Returns:
      The decoder, its parameters in the dtype in which they are used (norm scales float32), and the mesh.

    Raises:
      UserError: the stored parameters are not the profile's, or are damaged, or no moving average is stored.
    """
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | {axis: -1})
    model = FunctionalDecoder(source.profile, source.settings)
    shardings = parameter_shardings(model.abstract_parameters, model.logical_axes, mesh)

    # The values are those that training sees: there, too, weights are rounded where they are used, and norms are not.
    def wanted(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if path[-1].key == "scale" else source.settings.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    placed = jax.tree_util.tree_map_with_path(wanted, model.abstract_parameters, shardings)
    parameters = restore_parameters(source.path, placed, cast_floats=True, weights=source.weights)
    return model, parameters, mesh
