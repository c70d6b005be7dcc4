"""The command that compiles for GPUs that are not here; what it makes of a compiler's words."""

import importlib.util
import json
import re

import jax
import pytest

import pallas_kernels as kernels
from pallas_kernels import support
from ultraep_jax.bench.compile import command, programs, report, targets
from ultraep_jax.devices.device import Device
from ultraep_jax.tools.errors import CommandError

PTXAS = """
ptxas info    : Compiling entry function 'top_k_mosaic_gpu_kernel' for 'sm_100a'
ptxas info    : Function properties for top_k_mosaic_gpu_kernel
    0 bytes stack frame, {spilled} bytes spill stores, 24 bytes spill loads
ptxas info    : Used 23 registers, used 1 barriers
"""


def write_report(folder, name, spilled=0):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f"{name}_3.ptxas").write_text(PTXAS.format(spilled=spilled))
  (folder / f"{name}_3.resources.txt").write_text("Resources(smem_scratch_bytes=4096, x=1)")


def test_reports_are_read_wherever_the_kernel_was_lowered(tmp_path):
  write_report(tmp_path / "choose", "top_k", spilled=8)
  (tmp_path / "layer").mkdir()
  (tmp_path / "choose/top_k_3.ptxas").rename(tmp_path / "layer/top_k_3.ptxas")
  assert report.read(tmp_path / "choose") == []
  assert report.read(tmp_path / "layer") == [report.Kernel("top_k", "sm_100a", 23, 8, 4096)]


def test_a_report_that_says_nothing_is_an_error(tmp_path):
  write_report(tmp_path / "choose", "top_k")
  (tmp_path / "choose/top_k_3.ptxas").write_text("ptxas fatal: no")
  with pytest.raises(ValueError, match="expected a report of ptxas"):
    report.read(tmp_path / "choose")


def said(*lines):
  return "\n".join(map(json.dumps, lines))


def test_an_abort_is_told_with_the_compilers_words(tmp_path):
  write_report(tmp_path / "choose", "top_k")
  out = said(
    {"tries": "choose"}, {"name": "choose", "refused": None, "memory": 10}, {"tries": "matmul"}
  )
  err = "I see\nE1 LLVM ERROR: Cannot select: wgmma\n*** Begin stack trace ***\n"
  chosen, matmul = command.read_results(out, err, -6, tmp_path)
  assert chosen.kernels[0].registers == 23 and not chosen.aborted
  assert matmul.aborted and matmul.refused == "E1 LLVM ERROR: Cannot select: wgmma"
  assert "aborts the compiler" in command.find_faults("gb200", matmul)[0]
  shown = command.show([chosen, matmul])
  assert "top_k" in shown and "Cannot select" in shown


def test_a_child_that_fails_before_it_tries_anything_is_an_error(tmp_path):
  with pytest.raises(RuntimeError, match="no plugin"):
    command.read_results("", "no plugin", 1, tmp_path)


def test_the_next_process_goes_on_behind_an_abort(monkeypatch):
  def compile_until_matmul(gpu, topology, names):
    count = names.index("matmul") + 1 if "matmul" in names else len(names)
    return [command.Result(name, None, aborted=name == "matmul") for name in names[:count]]

  monkeypatch.setattr(command, "_compile", compile_until_matmul)
  results = command.compile_all("gb200", "1x1x2", programs.NAMES)
  assert [result.program for result in results] == list(programs.NAMES)


def test_what_must_not_be():
  spilling = report.Kernel("grouped_matmul", "sm_90a", 168, 16, 0)
  result = command.Result("matmul", None, kernels=[spilling])
  assert command.find_faults("h100", result) == ["matmul: grouped_matmul spills 16 bytes"]
  assert command.find_faults("h100", result._replace(kernels=[])) == []
  assert command.find_faults("h100", result._replace(program="layer")) == []
  worse = spilling._replace(spilled=command.MOST_SPILLED + 4)
  assert command.find_faults("h100", command.Result("layer", None, kernels=[worse]))
  refused = command.Result("combine", "NotImplementedError: not here")
  assert "is refused" in command.find_faults("gb300", refused)[0]


@pytest.mark.parametrize("name", targets.CHIPS)
def test_described_gpus_have_the_generation_that_their_names_say(name):
  major, minor = targets.CHIPS[name].capability
  text = targets.config(name)
  assert f"major: {major} minor: {minor} " in text and Device.load(name).kinds[0] in text
  described = jax.sharding.AbstractDevice(Device.load(name).kinds[0], 1, platform="gpu")
  assert support.generation(described) == major
  assert kernels.why_unsupported("plan", described) is None


@pytest.mark.parametrize("name", [n for n in programs.NAMES if not n.startswith("layer")])
def test_every_program_is_one_that_the_kernels_can_be_lowered_for(name):
  function, arguments = programs.build(name, jax.devices()[: programs.RANKS])
  text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu_v2" in text


def missing(name):
  """As Python answers where the package around a module is missing, too."""
  raise ModuleNotFoundError(name)


@pytest.mark.parametrize("find_spec", [missing, lambda name: None])
def test_says_what_to_install_without_the_compiler(find_spec, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", find_spec)
  with pytest.raises(CommandError, match=r"needs XLA's CUDA compiler; pip install jax-cuda13"):
    command.main(["--gpus", "h200"])


@pytest.mark.slow
def test_compiles_for_every_gpu(capsys):
  """``python -m pytest tests/bench/test_bench_compile.py``, where the compiler is installed."""
  try:
    targets.environment()
  except CommandError as reason:
    pytest.skip(str(reason))
  assert command.main([]) == 0, capsys.readouterr().out
  out = capsys.readouterr().out
  assert len(re.findall("compute capability", out)) == len(targets.CHIPS)
