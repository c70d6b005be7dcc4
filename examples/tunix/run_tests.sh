#!/usr/bin/env bash
# Installs tunix in an environment of its own and compares it with itself on balanced experts.
# Needs Python 3.12 as python3 and a package index; no accelerator. About 3 GB, 5 minutes.
#   examples/tunix/run_tests.sh [FOLDER OF THE ENVIRONMENT] [ARGUMENTS OF PYTEST…]
set -euo pipefail
environment=${1:-.venv-tunix}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ ! -x $environment/bin/pytest ]]; then
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet google-tunix==0.1.7 "jax<0.13" pytest pytest-xdist hypothesis
  "$environment/bin/pip" install --quiet --no-deps -e .
fi
exec "$environment/bin/python" -m pytest -m tunix tests/examples/test_tunix.py "${@:2}"
