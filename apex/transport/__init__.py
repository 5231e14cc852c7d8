"""Transports: the only code that imports mpi4py or zmq. Each offers the ports of ``apex.ports``."""
