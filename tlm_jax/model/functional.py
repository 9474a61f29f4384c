"""The decoder as pure functions over plain nested dicts of arrays: what the step, checkpoints and evaluation use.

The NNX graph is split once; steps pass plain dictionaries to `jax.jit`, which dispatches them as fast as any pytree.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from tlm_jax.capacity.profile import Profile
from tlm_jax.errors import UserError
from tlm_jax.model.decoder import Decoder
from tlm_jax.model.settings import ModelSettings

Parameters = dict[str, Any]  # nested dicts of arrays, keyed by module and parameter name


class FunctionalDecoder:
    """A `Decoder` split into its static definition and parameters that the caller holds.

    Raises:
      UserError: layers of a kind that a `Decoder` cannot have yet.

    Attributes:
      profile, settings: as given.
      abstract_parameters: nested dict of `jax.ShapeDtypeStruct`.
      logical_axes: the same tree with each parameter's tuple of logical axis names.
    """

    def __init__(self, profile: Profile, settings: ModelSettings) -> None:
        _check_layers(profile)
        self.profile, self.settings = profile, settings
        abstract = nnx.eval_shape(lambda: Decoder(profile, settings, jax.random.key(0)))
        self._definition, self._state = nnx.split(abstract)
        self.abstract_parameters: Parameters = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(self._state)
        )
        self.logical_axes = _map_variables(self._state, lambda variable: variable.get_metadata()["logical_axes"])

    def init(self, key: jax.Array) -> Parameters:
        """Draws all parameters; jit it with output shardings so that no device ever holds more than its part."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.profile, self.settings, key)))

    def bind(self, parameters: Parameters) -> Decoder:
        """The module with these parameters, for use inside a jitted function."""
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self._definition, state)


def _check_layers(profile: Profile) -> None:
    if any(layer.num_experts for layer in profile.layers):
        mend = "`tlm profile` shows them; to train, set --config.profile.num_experts=0"
        raise UserError("the model cannot run layers of experts yet", where="profile", mend=mend)


def _map_variables(state: Any, function: Any) -> Any:
    """A nested dict with `function(variable)` for each variable of an NNX state."""
    tree: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        *modules, name = map(str, path)
        node = tree
        for part in modules:
            node = node.setdefault(part, {})
        node[name] = function(variable)
    return tree
