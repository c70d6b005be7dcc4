"""The parts of ``train_tiny_moe.py``: settings, data, model, training, checkpoints, report."""
