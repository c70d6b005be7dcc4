#!/usr/bin/env bash
# Installs MaxText in an environment of its own and compares it with itself on balanced experts.
# Needs Python 3.12 as python3 and a package index; no accelerator. About 5 GB, 20 minutes.
#   examples/maxtext/run_tests.sh [FOLDER OF THE ENVIRONMENT] [ARGUMENTS OF PYTEST…]
set -euo pipefail
environment=${1:-.venv-maxtext}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ ! -x $environment/bin/pytest ]]; then
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet "maxtext[tpu]==0.2.5" pytest pytest-xdist hypothesis
  "$environment/bin/pip" install --quiet --no-deps -e .
fi
exec "$environment/bin/python" -m pytest -m maxtext tests/examples/test_maxtext.py "${@:2}"
