"""The parts of ``train_tiny_moe.py``: settings, data, model, training, checkpoints, report."""

import importlib.util

for _name in ("matplotlib", "orbax", "plotly", "safetensors", "tensorboardX", "tqdm"):
  if importlib.util.find_spec(_name) is None:
    raise SystemExit(f"expected {_name}, got none: in the clone, pip install -e '.[examples]'")
