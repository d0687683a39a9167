"""Benchmarks and the demonstration: `python -m bench.NAME --json`, from the repository root (docs: README, "Speed")."""
