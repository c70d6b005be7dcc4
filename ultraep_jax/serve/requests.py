"""What goes into the engine and what comes out."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class QueueFull(RuntimeError):
  """As many requests wait as ``EngineConfig.queue_limit`` allows; try again later."""


class RequestFailed(RuntimeError):
  """One request could not be computed; those of its batch are not concerned."""


class Prefilled(NamedTuple):
  """The result of one request. Times are of ``time.monotonic()``, in seconds.

  Attributes:
    token: the likeliest first token of the answer.
    logits_V: ``[V]`` float32 on the host; None without ``EngineConfig.return_logits``.
    cache: the model's, arrays ``[layers, P, ...]`` with P at least ``length``, on one device, 0
      beyond the prompt; None without ``EngineConfig.return_cache``. It occupies the device for
      as long as it is referenced.
    length: tokens of the prompt.
    queued: when it was submitted.
    started: when its batch was given to the devices.
    finished: when its token was on the host.
    batch: number of its batch, from 0.
    batch_requests: requests of that batch.
    batch_tokens: their tokens.
    batch_slots: rows times bucket: tokens that would have fitted.
    state: the model's behind the last token, arrays ``[layers, ...]`` where the cache is; None
      without ``EngineConfig.return_cache`` or where the model has none.
  """

  token: int
  logits_V: np.ndarray | None
  cache: Any
  length: int
  queued: float
  started: float
  finished: float
  batch: int
  batch_requests: int
  batch_tokens: int
  batch_slots: int
  state: Any = None


class Request(NamedTuple):
  """A prompt that waits or runs."""

  prompt: np.ndarray  # [n] int32
  future: concurrent.futures.Future[Prefilled]
  queued: float


def check_prompt(tokens: Sequence[int] | np.ndarray, vocab_size: int, longest: int) -> np.ndarray:
  """A copy of the prompt, ``[n]`` int32.

  Raises:
    TypeError: not integers, or none in a sequence or an array.
    ValueError: not one axis, empty, longer than ``longest``, or a token outside the vocabulary.
  """
  try:
    given = np.asarray(tokens)
  except ValueError:  # rows of several lengths
    raise ValueError("tokens: expected one axis, got sequences within the sequence") from None
  if not given.ndim:
    raise TypeError(
      f"tokens: expected a sequence or an array of integers, got {type(tokens).__name__}"
    )
  if given.ndim != 1:
    raise ValueError(f"tokens: expected one axis, got shape {given.shape}")
  if not given.size:
    raise ValueError("tokens: expected at least one, got an empty prompt")
  if not np.issubdtype(given.dtype, np.integer):
    raise TypeError(f"tokens: expected integers, got {given.dtype}")
  if given.size > longest:
    raise ValueError(f"tokens: expected at most {longest} (the largest bucket), got {given.size}")
  wrong = given[(given < 0) | (given >= vocab_size)]
  if wrong.size:
    raise ValueError(f"tokens: expected values in [0, {vocab_size}), got {wrong[0]}")
  return given.astype(np.int32)
