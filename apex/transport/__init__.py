"""Wires (only they import mpi4py or zmq) and endpoints (the ports of ``apex.ports`` over any wire)."""
