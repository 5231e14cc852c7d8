"""The replay rank: owns the transitions and their priorities, and nothing else."""
