"""Programs that compute the same, compiled in parallel, compared, and timed in turn."""

import dataclasses
import functools
import itertools
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax.bench import timing
from ultraep_jax.tools.errors import described
from ultraep_jax.types import Array

# The arguments of all programs: what each gives back for the next call, and the rest.
Arguments = tuple[Any, Any]
Program = Callable[[Any, Any], tuple[Any, Any]]
NO_TIME = "no time left"


@dataclasses.dataclass(frozen=True)
class Contest:
  """What competes.

  Attributes:
    title: for people.
    make: the arguments; compiled.
    programs: from the arguments to what replaces the first one, whose memory they may use, and
      further results.
    reference: the program whose results are right.
    used: keeps of the results what counts, given the rest of the arguments; compiled.
    others: programs that compute something else, and are timed only.
    sharding: of all arguments.
    most_error: relative distance of a right result.
  """

  title: str
  make: Callable[[], Arguments]
  programs: Mapping[str, Program]
  reference: str
  used: Callable[[Any, Any], Any] = lambda results, rest: results
  others: Mapping[str, Program] = types.MappingProxyType({})
  sharding: jax.sharding.Sharding | None = None
  most_error: float = 6e-3


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How the programs fared.

  Attributes:
    seconds: per call, for each program that ran and was right, round by round, all in turn.
    failures: what became of those that did not.
    others: seconds of the contest's others.
  """

  seconds: Mapping[str, list[float]]
  failures: Mapping[str, str]
  others: Mapping[str, list[float]] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Pace:
  """How much to do.

  Attributes:
    workers: threads that compile; 1: none but the caller's.
    calls: of a program in each of its turns, one right after the other.
    rounds: turns of each.
    end: of the time, as ``time.monotonic`` tells it, after which nothing is begun.
  """

  workers: int = 16
  calls: int = 5
  rounds: int = 5
  end: float = float("inf")


def hold(contests: Sequence[Contest], pace: Pace) -> Iterator[tuple[Contest, Outcome]]:
  """Compiles some contests' programs at a time in threads, then times those contests one by one.

  Nothing is compiled while something is timed.
  """
  programs = max((len(contest.programs) + len(contest.others) for contest in contests), default=1)
  for batch in itertools.batched(contests, max(2 * pace.workers // programs, 1)):
    if time.monotonic() > pace.end:
      yield from ((contest, Outcome({}, {contest.reference: NO_TIME})) for contest in batch)
      continue
    for contest, compiled in zip(batch, _compile_all(batch, pace), strict=True):
      yield contest, _run(contest, compiled, pace)


# What is compiled beside the programs.
_MAKE, _DISTANCE = "(arguments)", "(distance)"
Compiled = dict[str, Any]  # or, as a text, why it does not compile


def _compile_all(contests: Sequence[Contest], pace: Pace) -> list[Compiled]:
  jobs = [(index, *job) for index, c in enumerate(contests) for job in _jobs(c)]

  def attempt(job: tuple[int, str, Callable[[], Compiled]]) -> Compiled:
    _, name, compile_it = job
    if time.monotonic() > pace.end:
      return {name: NO_TIME}
    try:
      return compile_it()
    except Exception as error:  # of one program, which the others shall outlive
      return {name: described(error)}

  if pace.workers == 1:
    done = [attempt(job) for job in jobs]
  else:
    with futures.ThreadPoolExecutor(pace.workers) as pool:
      done = list(pool.map(attempt, jobs))
  compiled: list[Compiled] = [{} for _ in contests]
  for (index, *_), result in zip(jobs, done, strict=True):
    compiled[index] |= result
  return compiled


def _jobs(contest: Contest) -> Iterator[tuple[str, Callable[[], Compiled]]]:
  """Names, and what compiles them; lowering needs the interpreter's lock, compiling does not."""
  shapes = _sharded(contest, jax.eval_shape(contest.make))

  def compile_one(name: str) -> Compiled:
    program = {**contest.programs, **contest.others}[name]
    lowered = jax.jit(program, donate_argnums=0).lower(*shapes)
    compiled = {name: lowered.compile()}
    if name == contest.reference:
      results = _sharded(contest, lowered.out_info)
      compiled[_DISTANCE] = jax.jit(farthest).lower(results, results, shapes[1]).compile()
    return compiled

  def farthest(got: Any, wanted: Any, rest: Any) -> Array:
    pairs = zip(*(jax.tree.leaves(contest.used(x, rest)) for x in (got, wanted)), strict=True)
    return jnp.max(jnp.stack([distance(*pair) for pair in pairs]))

  make = jax.jit(contest.make, out_shardings=contest.sharding)
  yield _MAKE, lambda: {_MAKE: make.lower().compile()}
  for name in (*contest.others, *contest.programs):
    yield name, functools.partial(compile_one, name)


def _sharded(contest: Contest, tree: Any) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=contest.sharding), tree
  )


def distance(got: Array, wanted: Array) -> Array:
  """Relative, ``[]``, and infinite if a number is none; absolute if all should be zero."""
  got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
  gap, norm = jnp.linalg.norm(jnp.ravel(got - wanted)), jnp.linalg.norm(jnp.ravel(wanted))
  relative = jnp.where(norm > 0, gap / jnp.where(norm > 0, norm, 1), gap)
  return jnp.where(jnp.isnan(relative), jnp.inf, relative)


def _run(contest: Contest, compiled: Compiled, pace: Pace) -> Outcome:
  failures = {name: value for name, value in compiled.items() if isinstance(value, str)}
  if {_MAKE, contest.reference} & set(failures):
    return Outcome({}, failures)
  wanted = None
  for name in (contest.reference, *contest.programs):
    if name in failures:
      continue
    try:
      first, rest = compiled[_MAKE]()
      result = compiled[name](first, rest)
      wanted = result if wanted is None else wanted
      error = float(compiled[_DISTANCE](result, wanted, rest))
      if not error <= contest.most_error:
        failures[name] = f"differs by {error:.1e}"
    except Exception as error:  # of one program
      failures[name] = described(error)
  del wanted, result, first, rest  # room for what is timed
  if contest.reference in failures:
    return Outcome({}, failures)
  runs = {
    name: compiled[name] for name in (*contest.others, *contest.programs) if name not in failures
  }
  try:
    times = _times(compiled[_MAKE](), runs, pace)
  except Exception as error:
    return Outcome({}, failures | {contest.reference: described(error)})
  others = {name: times.pop(name) for name in contest.others if name in times}
  return Outcome(times, failures, others)


def _times(arguments: Arguments, programs: Mapping[str, Any], pace: Pace) -> dict[str, list[float]]:
  first, rest = arguments

  def turn(program: Callable[..., Any]) -> Any:
    nonlocal first
    results = None
    for _ in range(pace.calls):
      first, results = program(first, rest)
    return first, results

  runs = {name: functools.partial(turn, program) for name, program in programs.items()}
  return timing.in_turn(runs, pace.rounds, pace.calls)


# --- who wins --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
  """The winner.

  Attributes:
    name: of the program.
    gain: by how much it is faster than the reference, 0.02: the reference takes 2 % longer.
  """

  name: str
  gain: float


def choose(seconds: Mapping[str, Sequence[float]], reference: str, least_gain: float) -> Choice:
  """The program with the largest gain, if it is beyond doubt, else the reference.

  Programs are compared round by round, so that a drift of all does not count. The gain is the
  median over the rounds; in three of four rounds it must be more than ``least_gain``.

  >>> choose({"a": [1.0, 1.1, 1.0], "b": [0.9, 1.0, 0.91], "c": [0.8, 1.3, 1.0]}, "a", 0.01).name
  'b'
  """
  best = Choice(reference, 0.0)
  for name, times in seconds.items():
    gain = np.asarray(seconds[reference]) / np.asarray(times) - 1
    median = float(np.median(gain))
    if float(np.quantile(gain, 0.25)) > least_gain and median > best.gain:
      best = Choice(name, median)
  return best
