"""Transports: the only code that imports mpi4py or zmq. Found by name; each offers ``run(...)``."""
