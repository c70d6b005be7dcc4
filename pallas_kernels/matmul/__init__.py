"""Grouped matmuls on two operands, with transfers beside them."""
