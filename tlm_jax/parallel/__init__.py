"""The device mesh, the rules that place arrays on it, and start-up over many hosts."""
