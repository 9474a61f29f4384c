"""Capacity as plain data: the shape of each layer, made before any array exists. NumPy only, no JAX."""

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape

__all__ = ["LayerShape", "Profile", "profile_from_config"]
