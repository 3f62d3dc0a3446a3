from pathlib import Path

from air_hpc.rundir.layout import RunDir
from air_hpc.tracking.artifacts import collect

TEXT = """\
env:
  NCCL_IB_PKEY: '0'
  TOKENIZERS_PARALLELISM: false
  MY_API_KEY: hunter2
  PASS: abc
steps: 1000, shuffle: false, again: hunter2
export PASS='abc' NCCL_IB_PKEY=0
"""


def test_only_what_may_be_a_secret_is_taken_out_of_the_whole_text(tmp_path: Path) -> None:
    """Once every 0 and every false of run.yaml became `***`, for variables that sound secret."""
    run = RunDir(tmp_path)
    run.run_yaml.write_text(TEXT)
    env = {
        "NCCL_IB_PKEY": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "MY_API_KEY": "hunter2",
        "PASS": "abc",
    }
    ((name, told),) = collect(run, env)
    assert name == "run.yaml"
    assert "hunter2" not in told
    assert "abc" not in told
    assert "steps: 1000, shuffle: false, again: ***\n" in told
    assert "PASS: ***" in told
