"""Training steps of a language model."""
