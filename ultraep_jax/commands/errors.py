"""How a command says that it cannot do what was asked."""


class CommandError(Exception):
  """Ends the program with this message and status 1, without a traceback."""
