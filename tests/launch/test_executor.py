from pathlib import Path

import pytest

from air_hpc.errors import BadInput
from air_hpc.launch.executor import AgentExecutor, header_lines


def test_no_function_is_pickled(tmp_path: Path) -> None:
    executor = AgentExecutor(tmp_path / "script.sh", timeout_s=5)
    with pytest.raises(NotImplementedError):
        executor.submit(print, 1)
    with pytest.raises(NotImplementedError):
        executor.map_array(print, [1, 2])
    assert list(tmp_path.iterdir()) == []


def test_a_line_holds_one_option_and_nothing_else() -> None:
    assert header_lines((("requeue", True), ("comment", "it's"))) == [
        "#SBATCH --requeue",
        """#SBATCH --comment='it'"'"'s'""",
    ]


@pytest.mark.parametrize("value", ["a\nrm -rf ~", "a\\b", ""])
def test_what_sbatch_would_misread_is_refused_with_all_else(value: str) -> None:
    with pytest.raises(BadInput) as caught:
        header_lines((("comment", value), ("account", "fine"), ("qos", value)))
    assert [problem.key for problem in caught.value.problems] == ["comment", "qos"]


def test_scripts_can_be_rendered_where_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    executor = AgentExecutor(tmp_path / "a script.sh", timeout_s=5, sbatch_args=["--x"])
    assert executor._make_submission_command(executor.script) == [
        "sbatch", "--parsable", "--x", str(tmp_path / "a script.sh"),
    ]  # fmt: skip
