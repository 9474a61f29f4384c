"""Variants of a config trained over seeds and compared in pairs; only its runs and `check` touch the devices."""
