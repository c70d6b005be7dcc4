"""The scales of tokens in FP8: one for each block of values of a row."""

SCALED = 128  # values of a row that share a scale: the last of a row may be fewer
_UNIT = 4  # scales of 16 bytes, the unit of bulk copies


def num_scales(width: int) -> int:
  """How many float32 scales a row of ``width`` values has: one for each 128, in multiples of 4.

  >>> num_scales(4096), num_scales(200)
  (32, 4)
  """
  return -(-width // (SCALED * _UNIT)) * _UNIT
