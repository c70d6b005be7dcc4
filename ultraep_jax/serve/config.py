"""The frozen configuration of the prefill engine."""

import dataclasses

from ultraep_jax.config import as_python_numbers, check_int, check_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """How requests become batches. NumPy's numbers become Python's.

  Attributes:
    buckets: T, token budgets of a row, ascending. Each is one compiled program; a batch runs in
      the smallest that holds its fullest row. The last bounds the length of a prompt.
    alignment: every request starts at a multiple of this, which divides the buckets. Models need
      it to compute the same wherever a request lies: a multiple of their attention's key block.
    max_requests: R, requests of one row.
    queue_limit: requests that may wait; the next one is refused with ``QueueFull``.
    return_cache: hand each request's cache back, on the device that computed it.
    return_logits: hand each request's logits back, on the host.

  Raises:
    ValueError: a value is outside its range, or the alignment does not divide the buckets.
    TypeError: a value has the wrong type.
  """

  buckets: tuple[int, ...] = (1024, 4096, 8192)
  alignment: int = 128
  max_requests: int = 64
  queue_limit: int = 1024
  return_cache: bool = True
  return_logits: bool = False

  def __post_init__(self) -> None:
    as_python_numbers(self)
    for name in ("alignment", "max_requests", "queue_limit"):
      check_int(name, getattr(self, name), minimum=1)
    for name in ("return_cache", "return_logits"):
      check_type(name, getattr(self, name), bool)
    if not isinstance(self.buckets, tuple):
      raise TypeError(f"buckets: expected a tuple of ints, got {self.buckets!r}")
    if not self.buckets:
      raise ValueError("buckets: expected at least one size, got ()")
    for bucket in self.buckets:
      check_int("buckets", bucket, minimum=1)
      if bucket % self.alignment:
        raise ValueError(f"buckets: expected multiples of {self.alignment}, got {bucket}")
    if list(self.buckets) != sorted(set(self.buckets)):
      raise ValueError(f"buckets: expected ascending sizes, got {self.buckets}")
