"""What moves between ranks: tokens to their experts and back, and copies of experts' weights."""
