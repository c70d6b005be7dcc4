"""What experts compute: rounds of rows, and the grouped matmuls in them."""
