"""Data sets: one small module per task; each has a config dataclass and a `load(config)`."""
