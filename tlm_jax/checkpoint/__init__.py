"""Checkpoints: saving while training goes on, resuming, and restoring parameters for evaluation.

A checkpoint is one directory, `<workdir>/checkpoints/<step>`, which needs nothing outside itself: parameters, the
rest of the train state, the data index, the config, the profile and the tokenizer. Orbax writes it under a temporary
name and renames it when it is complete, so a step directory either is whole or does not exist.
"""
