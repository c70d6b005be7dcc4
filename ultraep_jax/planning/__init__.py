"""Load, plan and route: integers that every rank computes alike."""
