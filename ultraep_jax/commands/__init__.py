"""The commands of ``ultraep``.

A module is a command: its docstring is the help, ``add_arguments(parser)`` declares what it takes
and ``run(args)`` returns the exit status. ``cli.py`` lists them.
"""
