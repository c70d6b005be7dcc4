"""A sparse MoE block in MaxText's form, with and without balanced experts."""
