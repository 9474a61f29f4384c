"""Kernels of our own, each with its plain-JAX reference and its dispatch."""
