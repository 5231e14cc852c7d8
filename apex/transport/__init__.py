"""The wires, the only code that imports mpi4py or zmq, and the endpoints: the ports of ``apex.ports`` over any wire."""
