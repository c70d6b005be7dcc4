"""The launch script: processes of several hosts, as Slurm starts them, and one that is killed."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import launch
import pytest
from other_host import other_host
from ports import free_port

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples/launch.py"
# Step by step, each process waits for the other.
TOGETHER = """
import jax
from jax import lax
from jax.sharding import PartitionSpec as P

def sum_of_all():
  return lax.psum(lax.axis_index("rank"), "rank")

mesh = jax.make_mesh((2,), ("rank",))
step = jax.jit(jax.shard_map(sum_of_all, mesh=mesh, in_specs=(), out_specs=P()))
for i in range(10**6):
  assert int(step()) == 1
  print("step", i, flush=True)
"""


@pytest.fixture
def start():
  """Starts launchers, and leaves none behind."""
  with contextlib.ExitStack() as stack:

    def begin(*args: object, devices: int = 1, prefix: tuple[str, ...] = (), **env: object):
      flags = f"--xla_force_host_platform_device_count={devices}"
      own = {name: str(value) for name, value in env.items()}
      own |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
      launcher = subprocess.Popen(
        [*prefix, sys.executable, str(SCRIPT), *map(str, args)],
        env=os.environ | own | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      stack.enter_context(launcher)
      stack.callback(launcher.kill)  # its workers end with it
      return launcher

    yield begin


def hosts(port: int, count: int = 2, heartbeat: int = 10) -> list[tuple[object, ...]]:
  """The arguments of the launchers of hosts with a process each."""
  address = f"localhost:{port}"
  common = ("--hosts", count, "--coordinator", address, "--processes", 1, "--heartbeat", heartbeat)
  return [(*common, "--host", host) for host in range(count)]


def finish(launcher: subprocess.Popen, seconds: float = 120) -> tuple[str, str]:
  try:
    return launcher.communicate(timeout=seconds)
  except subprocess.TimeoutExpired:
    launcher.kill()
    pytest.fail(f"still ran after {seconds} s:\n{launcher.communicate()[1][-3000:]}")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_process_ends_those_of_all_hosts_with_a_message_each(start, tmp_path):
  program = tmp_path / "together.py"
  program.write_text(TOGETHER)
  first, second = (start(*args, program) for args in hosts(free_port(), heartbeat=4))
  while "step 1" not in (line := first.stdout.readline()):
    assert line, finish(first)[1][-3000:]
  started = second.stderr.readline()
  pid = re.fullmatch(r"launch: host 1 of 2 runs a process for each of 1 GPUs: (\d+)\n", started)
  assert pid, started
  os.kill(int(pid[1]), signal.SIGKILL)
  killed = time.monotonic()
  _, errors = finish(second, 60)
  assert errors.splitlines()[-1] == (
    "launch: process 1 (device 0 of host 1) was killed by SIGKILL; the others of this host are "
    "ended, those of other hosts end within 4 s; if it lost another process, that one's host says "
    "why"
  )
  _, errors = finish(first, 60)
  assert time.monotonic() - killed < 60
  assert first.returncode == second.returncode == 1
  last = errors.splitlines()[-1]
  assert last.startswith("launch: process 0 (device 0 of host 0) "), errors[-3000:]
  assert last.endswith("if it lost another process, that one's host says why")


@pytest.mark.multiprocess
def test_doctor_on_two_hosts(start, tmp_path):
  """Each host is a node, and copies stay inside it; the first process alone prints.

  The layer that is checked sends tokens from one to the other.
  """
  prefix = other_host(tmp_path)
  first, second = hosts(free_port())
  doctor = ("-m", "ultraep_jax", "doctor")
  one, two = start(*first, *doctor, devices=2), start(*second, *doctor, devices=2, prefix=prefix)
  out, errors = finish(one)
  assert one.returncode == 0, errors[-3000:]
  assert 'nodes:          2, of 2 devices; domain_size="auto" keeps copies among 2 ranks' in out
  assert "(2 processes)" in out and "check:          passed" in out
  assert 'jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2)), ("data", "expert"))' in out
  assert finish(two)[0] == ""


@pytest.mark.multiprocess
def test_tasks_of_slurm(start, tmp_path):
  """With the variables that Slurm sets; two tasks of one host are one node."""
  job = {"SLURM_JOB_ID": free_port(), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": 2}
  program = tmp_path / "program.py"
  program.write_text(
    "import sys, jax\nfrom ultraep_jax import nodes\n"
    "print(sys.argv[1], jax.process_count(), nodes.of_devices(jax.devices()))\n"
  )
  tasks = [
    start(program, "--given", **job, SLURM_PROCID=i, SLURM_LOCALID=i, SLURM_STEP_NUM_NODES=1)
    for i in range(2)
  ]
  assert [finish(task)[0] for task in tasks] == ["--given 2 [0 0]\n", ""]
  assert [task.returncode for task in tasks] == [0, 0]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("--processes 8", "PROGRAM: expected one, got none"),
    ("train.py", "--processes: expected the number of GPUs, as Slurm did not start this, got none"),
    ("--processes -1 train.py", "--processes: expected at least 1, got -1"),
    ("--processes 8 --hosts 2 --host 2 train.py", "--host: expected 0 to 1, got 2"),
    ("--processes 8 --hosts 2 train.py", "--coordinator: expected host 0's ADDRESS:PORT"),
    ("--processes 8 --hosts 0 train.py", "--hosts: expected at least 1, got 0"),
    ("--processes 1 --coordinator foo train.py", "expected ADDRESS:PORT, got 'foo'"),
    ("--processes 1 --coordinator foo: train.py", "expected ADDRESS:PORT, got 'foo:'"),
    ("--processes 1 --coordinator :29400 train.py", "expected ADDRESS:PORT, got ':29400'"),
    ("--processes 1 --coordinator foo:99999 train.py", "--coordinator: expected ADDRESS:PORT"),
    ("--processes 8 --heartbeat 100 train.py", "--heartbeat: expected 1 to 60 seconds, got 100"),
  ],
)
def test_wrong_arguments(line, message, monkeypatch, capsys):
  monkeypatch.delenv("SLURM_PROCID", raising=False)
  with pytest.raises(SystemExit):
    launch.main(line.split())
  assert message in capsys.readouterr().err


def test_a_job_of_several_hosts():
  line = "--processes 8 --hosts 4 --host 2 --coordinator node0:1234 train.py --processes 3"
  job = launch.parse(line.split())
  assert job.command == ("train.py", "--processes", "3") and job.heartbeat == 30
  assert launch.failure(job, 5, 3).startswith("process 21 (device 5 of host 2) ended with status 3")
