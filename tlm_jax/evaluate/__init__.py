"""Evaluation of checkpoints: perplexity and bits per byte, reference points, and text generation."""
