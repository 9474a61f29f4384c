"""NNX modules built from a Profile, and the vocabulary loss."""
