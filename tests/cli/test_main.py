"""The command line as a whole: verbs, errors and exit codes, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from air_hpc.cli.main import VERBS, main
from tests.cli.commands import air_hpc, environ, json_of


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_has_help_with_examples_that_fits_a_screen(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main([*([verb] if verb else []), "--help"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "usage: python -m air_hpc" in told.out
    assert told.out.count("  python -m air_hpc") >= 2
    assert max(map(len, told.out.splitlines())) <= 100


def test_the_python_of_another_environment_is_told_what_it_lacks(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ClusterShell'] = None; from air_hpc.cli import main as m; "
    done = air_hpc("status", cwd=tmp_path, program=("-c", f"{code}sys.exit(m.main())"))
    assert done.returncode == 1
    assert "air_hpc needs ClusterShell, which this Python does not have" in done.stderr
    assert sys.executable in done.stderr
    assert "bin/activate" in done.stderr


def test_help_may_be_asked_for_like_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "plan"]) == 0
    assert "usage: python -m air_hpc plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (["stauts"], ["no such verb", "Did you mean status?"]),
        (["model=tiny", "status"], ["A verb goes first: python -m air_hpc status"]),
        (["--dryrun"], ["unknown option --dryrun", "Did you mean --dry-run?"]),
        (["plan", "model=tyny"], ["no such option", "llama_8b", "Did you mean tiny?"]),
        (["plan", "--config-dir", "nowhere"], ["no such folder"]),
        (["plan", "train.steps=1,2"], ["several values", "Add -m"]),
        (["--cfg", "hydra"], ["no config of Hydra's own"]),
        (["logs", "a", "b"], ["logs takes one run"]),
        (["cancel"], ["run: name the runs to cancel"]),
        (["plan", "accelerator=h100"], ["Did you mean h100_nvl, h100_pcie or h100_sxm?"]),
        (["train.steps=10"], ["below 10", "add schedule.warmup_steps=1"]),
        (["status", "nothing"], ["no such run", "there are no runs here"]),
        (["--shell-completion", "install=fish"], ["install=bash"]),
    ],
)
def test_bad_input_says_what_is_allowed_and_ends_with_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    pieces: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    for piece in pieces:
        assert piece in told.err


def test_every_problem_of_config_plan_and_script_is_listed_in_one_pass(tmp_path: Path) -> None:
    done = air_hpc(
        "--json",
        "cluster=slurm",
        "modle=x",
        "train.steps=many",
        "model.heads=0",
        "launch.sbatch={arrays: 3}",
        "launch.comment='a\nb'",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    body = json_of(done)
    assert body["exit_code"] == 2
    keys = {problem["key"] for problem in body["problems"]}
    assert {"modle", "train.steps", "model.heads", "launch.sbatch.arrays", "launch.comment"} <= keys
    assert not (tmp_path / "runs").exists()


def test_an_environment_that_fails_says_what_to_do_and_ends_with_1(tmp_path: Path) -> None:
    done = air_hpc("cluster=slurm", "--json", cwd=tmp_path, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    body = json_of(done)
    assert body["next_step"]
    assert body["problems"] == []


def test_a_home_of_nobody_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--runs-dir", "~no-such-user/runs"]) == 2
    assert "the name of no user here" in capsys.readouterr().err


def test_a_folder_that_was_removed_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["status"], ["--dry-run"]):
        assert main(words) == 1
        assert "has been removed" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_and_a_file(tmp_path: Path) -> None:
    broken = (
        "import sys, air_hpc.cli.main as m\n"
        "m._load = lambda name: 1 / 0\n"
        "sys.exit(m.main(sys.argv[1:]))"
    )
    env = {"TMPDIR": str(tmp_path)}
    done = air_hpc("status", "--json", cwd=tmp_path, env=env, program=("-c", broken))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "ZeroDivisionError" in json_of(done)["error"]
    kept = next(tmp_path.glob("air_hpc-*.traceback"))
    assert str(kept) in done.stderr
    assert "Traceback" in kept.read_text()
    env["AIR_HPC_DEBUG"] = "1"
    shown = air_hpc("status", cwd=tmp_path, env=env, program=("-c", broken))
    assert "Traceback" in shown.stderr


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m air_hpc plan -m train.seed='range(0,300)' | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""


def test_version(tmp_path: Path) -> None:
    assert air_hpc("--version", cwd=tmp_path).stdout.startswith("air_hpc ")
