"""What commands and measurements share: processes, progress bars, a check of a small layer."""
