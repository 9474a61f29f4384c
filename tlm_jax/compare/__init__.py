"""Variants of a config trained over seeds and compared in pairs. No JAX: the devices belong to the runs."""
