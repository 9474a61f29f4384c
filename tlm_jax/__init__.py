"""tlm_jax: pretraining of language models whose layers do not all have the same size."""

__version__ = "0.1.0"
