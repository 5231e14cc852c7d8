"""Benchmarks of priority indexes, transports, whole systems and rates, with the baselines of each."""
