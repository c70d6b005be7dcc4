"""The default: replicas and quotas for the exact load."""

from ultraep_jax.planning.plan import plan_quotas

plan = plan_quotas
