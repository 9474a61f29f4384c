"""Training: objective, optimizer, the pure step, validation, the loop, metrics."""
