"""Benchmarks: priority indexes, transports, whole systems, rates, and the baselines they are compared with."""
