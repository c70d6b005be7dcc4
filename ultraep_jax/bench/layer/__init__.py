"""Times of one layer."""
