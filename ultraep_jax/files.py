"""Files that users hand in, which may hold anything, and files that are written for them."""

import json
import os
import pathlib
from typing import Any

import numpy as np


def regular(path: pathlib.Path) -> pathlib.Path:
  """The path, if an ordinary file is there: a device or a pipe might never end.

  Raises:
    FileNotFoundError: nothing is there.
    ValueError: something else is there.
  """
  if path.is_file():
    return path
  if path.is_dir():
    raise ValueError(f"{path}: expected a file, got a folder")
  if path.exists():
    raise ValueError(f"{path}: expected a file, got a device or a pipe")
  raise FileNotFoundError(f"{path}: expected a file, got nothing")


def read_json(path: pathlib.Path) -> Any:
  """The value in a JSON file.

  Raises:
    ValueError: something else is there; the message begins with the path.
    OSError: it cannot be read.
  """
  return parse_json(regular(path).read_bytes(), str(path))


def parse_json(text: str | bytes, name: str) -> Any:
  """The value of a JSON text in UTF-8. NaN and infinities pass, as in Python.

  Raises:
    ValueError: it is no JSON; the message begins with ``name``.
  """
  try:
    text = text.decode() if isinstance(text, bytes) else text
    value = json.loads(text)
    if "\\u" in text:  # half a surrogate pair could be neither printed nor a file's name
      json.dumps(value, ensure_ascii=False).encode()
  except RecursionError:
    raise ValueError(f"{name}: expected JSON, got values nested too deeply") from None
  except ValueError as error:
    raise ValueError(f"{name}: expected JSON, got {error}") from error
  return value


def read_array(path: pathlib.Path) -> np.ndarray:
  """The array of numbers in a ``.npy`` file.

  Raises:
    ValueError: something else is there; the message begins with the path.
    OSError: it cannot be read.
  """
  with regular(path).open("rb") as file:
    if file.read(6) != b"\x93NUMPY":
      raise ValueError(f"{path}: expected a whole .npy file, got something else")
  try:
    # A map compares the size that the header claims with that of the file, and allocates nothing.
    found = np.load(path, mmap_mode="r", allow_pickle=False)
  except OSError:
    raise
  except Exception as error:  # the header is parsed as Python, which fails in many ways
    raise ValueError(f"{path}: expected a whole .npy file, got {error!s:.200}") from error
  if found.dtype.kind not in "biuf":
    raise ValueError(f"{path}: expected a .npy file of numbers, got {found.dtype}")
  return np.array(found)


def check_output(path: pathlib.Path | None) -> None:
  """Refuses a path that `write_text` could not write, before work is done for it.

  Raises:
    OSError: there is no such folder, or no right to write.
  """
  if path is None or path.is_char_device():
    return
  if path.is_dir():
    raise IsADirectoryError(f"{path}: expected a file to write, got a folder")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{path}: expected a folder to write in, got none at {path.parent}")
  if not os.access(path if path.exists() else path.parent, os.W_OK):
    raise PermissionError(f"{path}: expected the right to write there, got none")


def check_folder(path: pathlib.Path) -> None:
  """Refuses a folder that `make_folder` could not make or nobody could write in.

  Raises:
    OSError: a file is in its place or above, or there is no right to write.
  """
  there = next(each for each in (path, *path.parents) if os.path.lexists(each))
  if not there.is_dir():
    at = "" if there == path else f" at {there}"
    raise NotADirectoryError(f"{path}: expected a folder to write in, got a file{at}")
  if not os.access(there, os.W_OK):
    raise PermissionError(f"{path}: expected the right to write there, got none")


def make_folder(path: pathlib.Path) -> None:
  """Makes a folder and those above, if they are not there.

  Raises:
    OSError: it cannot be made, or as `check_folder`; the message begins with the path.
  """
  check_folder(path)
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    got = error.strerror or error
    raise type(error)(f"{path}: expected to make it, got: {got}") from error


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a text file in UTF-8.

  Raises:
    OSError: it cannot be written; the message begins with the path.
  """
  try:
    path.write_text(text, encoding="utf-8")
  except OSError as error:
    raise OSError(f"{path}: expected to write it, got: {error.strerror or error}") from error
