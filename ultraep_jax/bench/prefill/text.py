"""Prompts of real text of several domains, from what every installation carries."""

import ast
import importlib.metadata
import importlib.util
import pathlib
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pydoc_data import topics
from typing import NamedTuple

import numpy as np

DOMAINS = ("code", "mathematics", "prose")
# Packages that the library needs, whose docstrings are about mathematics.
_MATHEMATICS = (
  "numpy.linalg",
  "numpy.polynomial",
  "numpy.fft",
  "jax._src.numpy",
  "jax._src.scipy",
  "statistics",
)
_WORDS = re.compile(r"\w+|[^\w\s]|\s+")


class Prompt(NamedTuple):
  """A piece of a domain's text: its domain's name and ``[n]`` int32 tokens."""

  domain: str
  tokens: np.ndarray


def make_prompts(
  seed: int, count: int, shortest: int, longest: int, vocab_size: int, text_bytes: int = 1 << 20
) -> list[Prompt]:
  """Prompts of mixed domains, their lengths spread evenly over the logarithm.

  The same on machines with the same Python and packages.

  Args:
    seed: of domains, lengths and places in the text.
    count: of prompts.
    shortest: tokens.
    longest: tokens.
    vocab_size: V.
    text_bytes: of each domain's text.
  """
  rng = np.random.default_rng(seed)
  streams = {name: tokenize(domain_text(name, text_bytes), vocab_size) for name in DOMAINS}
  prompts = []
  for domain in rng.choice(DOMAINS, count):
    stream = streams[domain]
    length = round(float(np.exp(rng.uniform(np.log(shortest), np.log(longest)))))
    start = int(rng.integers(0, max(len(stream) - length, 1)))
    prompts.append(Prompt(str(domain), np.resize(stream[start : start + length], length)))
  return prompts


def tokenize(text: str, vocab_size: int) -> np.ndarray:
  """``[n]`` int32: a hash of each word, sign or space, for models that never saw a tokenizer.

  >>> tokenize("to be, or not to be", 100).tolist()
  [56, 77, 25, 78, 77, 39, 77, 93, 77, 56, 77, 25]
  """
  words = _WORDS.findall(text)
  token = {word: zlib.crc32(word.encode()) % vocab_size for word in set(words)}
  return np.array([token[word] for word in words], np.int32)


def domain_text(domain: str, size: int) -> str:
  """About ``size`` bytes of a domain's documents, at least one document."""
  sources = {"code": _code, "mathematics": _mathematics, "prose": _prose}
  parts, total = [], 0
  for document in sources[domain]():
    parts.append(document)
    total += len(document)
    if total >= size:
      break
  return "\n".join(parts)[:size]


def _code() -> Iterator[str]:
  """Sources of the standard library, in an order that mixes its parts."""
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  paths = [path for path in folder.rglob("*.py") if "site-packages" not in path.parts]
  yield from _read(_mixed(paths, folder))


def _mathematics() -> Iterator[str]:
  """Docstrings of numerical packages."""
  for source in _read(path for name in _MATHEMATICS for path in _files(name)):
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node)
        if text and len(text) > 200:
          yield text


def _prose() -> Iterator[str]:
  """Python's manual, then the descriptions of what is installed."""
  yield from (text for _, text in sorted(topics.topics.items()))
  named = {d.metadata["Name"]: d for d in importlib.metadata.distributions()}
  yield from (named[name].read_text("METADATA") or "" for name in sorted(named, key=str.lower))


def _files(module: str) -> Sequence[pathlib.Path]:
  spec = importlib.util.find_spec(module)
  assert spec is not None and spec.origin is not None
  path = pathlib.Path(spec.origin)
  return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


def _mixed(paths: Iterable[pathlib.Path], folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(paths, key=lambda p: zlib.crc32(str(p.relative_to(folder)).encode()))


def _read(paths: Iterable[pathlib.Path]) -> Iterator[str]:
  for path in paths:
    try:
      yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # the standard library tests encodings
      continue
