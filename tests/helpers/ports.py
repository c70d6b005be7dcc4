"""Ports for the processes that tests start."""

import socket


def free_port() -> int:
  """One of this machine that nothing listens on."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]
