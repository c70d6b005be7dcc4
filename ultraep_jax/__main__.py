"""``python -m ultraep_jax`` is the command ``ultraep``: see ``ultraep_jax.cli``."""

import sys

from ultraep_jax.cli import main

sys.exit(main())
