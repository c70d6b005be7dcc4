"""What balancing by default costs and gains: models, batches and loads, beside not balancing."""
