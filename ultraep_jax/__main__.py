"""``python -m ultraep_jax``: see ``ultraep_jax.cli``."""

import sys

from ultraep_jax.cli import main

sys.exit(main())
