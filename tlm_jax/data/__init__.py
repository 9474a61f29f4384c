"""Data: tokenizers, token stores, windows and the loader. Knows nothing of models or devices."""
