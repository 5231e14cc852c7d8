"""The learner: optimises the network, ends the run, writes checkpoints and the log."""
