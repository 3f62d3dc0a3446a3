import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest

from air_hpc.config.spec import ContainerSpec
from air_hpc.errors import BadInput
from air_hpc.launch import script
from tests.launch.making import spec, task

ODD = "/srv/runs of 'us' $HOME/#1 ü"


def rendered(path: str = ODD, array: bool = False, **options: Any) -> str:
    made = spec(path, **options)
    place = script.ScriptPlace(
        path=Path(f"{path}/submit/script.sh"),
        title="run x",
        run_dir=None if array else Path(path),
        index=Path(f"{path}/0.runs") if array else None,
    )
    return script.body(made, task(made).plan, place)


def parses(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize(
    "cluster",
    [
        {},
        {"modules": ("cuda/12.4", "it's"), "venv": "/srv/a venv"},
        {"conda_env": "my env", "env": {"A": "x'y\"z $HOME"}, "setup": ("ulimit -l unlimited",)},
        {"network_interface": "ib0", "srun_args": ("--mpi=none", "--label")},
    ],
)
def test_bash_parses_every_form_of_the_script(cluster: dict[str, Any], array: bool) -> None:
    text = rendered(cluster=cluster, array=array)
    assert parses(text)
    assert "{{" not in text
    assert "{%" not in text


@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_only_the_agents_are_in_a_container(kind: str) -> None:
    container = ContainerSpec(kind=kind, image="/img s/x.sif", mounts=("/data",))
    text = rendered(cluster={"container": container})
    assert parses(text)
    (line,) = [x for x in text.splitlines() if "-m air_hpc.agent" in x]
    srun = text[text.index("\nsrun ") : text.index("srun_pid=$!")]
    assert "/img s/x.sif" in srun
    assert "/data" in srun
    assert "python3 -m air_hpc.agent" in line
    assert ("apptainer exec" in line) == (kind == "apptainer")
    assert text.count("/img s/x.sif") == 1


def test_the_srun_line_says_what_slurm_versions_disagree_on() -> None:
    text = rendered(nodes=2, devices_per_node=4, cpus_per_device=3)
    (line,) = [x for x in text.splitlines() if x.startswith("srun ")]
    words = line.split()
    for word in ("--cpus-per-task=12", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0",
                 "--ntasks-per-node=1", "--nodes=2"):  # fmt: skip
        assert word in words


@pytest.mark.parametrize(
    ("cluster", "python"),
    [
        ({"python": "/opt/my python"}, "'/opt/my python'"),
        ({"venv": "/srv/v"}, "/srv/v/bin/python"),
        ({"conda_env": "e"}, "python"),
    ],
)
def test_the_python_of_the_job(cluster: dict[str, Any], python: str) -> None:
    assert f"\n  {python} -m air_hpc.agent " in rendered(cluster=cluster)


def test_problems_of_the_cluster_config_come_together() -> None:
    made = spec(
        "/runs",
        cluster={
            "template": "defualt",
            "env": {
                "A-B": "x",
                "WANDB_API_KEY": "hunter2",
                "TOKENIZERS_PARALLELISM": "false",
                "OK": "a\nb",
            },
            "modules": ("a\nb",),
        },
    )
    found = script.problems(made)
    assert [problem.key for problem in found] == [
        "cluster.template",
        "cluster.env.A-B",
        "cluster.env.WANDB_API_KEY",
        "cluster.modules",
        "cluster.env",
    ]
    assert found[0].hint == "Did you mean default?"
    assert "hunter2" not in " ".join(map(str, found))


def test_a_secret_is_refused_wherever_it_is_written_out() -> None:
    """Once `export HF_TOKEN=...` as a line of setup stood in every script."""
    setup = ("cd /x && export HF_TOKEN=hunter2", "wandb login --api_key='hunter2'")
    found = script.problems(spec("/runs", cluster={"setup": setup}))
    assert [(p.key, p.value) for p in found] == [("cluster.setup", "(not shown)")] * 2
    assert "HF_TOKEN" in found[0].message
    assert "hunter2" not in " ".join(map(str, found))


def test_what_only_sounds_like_a_secret_is_taken() -> None:
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "HF_TOKEN_PATH": "/home/me/token",
    }
    setup = ("export HF_TOKEN=$(cat ~/token)", 'export A_TOKEN="$B"', "unset API_KEY; TOKEN= x")
    assert script.problems(spec("/runs", cluster={"env": env, "setup": setup})) == []


def test_a_sites_own_template_may_include_ours(tmp_path: Path) -> None:
    own = tmp_path / "mine.sh.j2"
    own.write_text("# a site of our own\n{% include 'default.sh.j2' %}")
    text = rendered(cluster={"template": str(own)})
    assert text.startswith("# a site of our own\n")
    assert parses(text)


def test_folders_of_the_users_home_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container was once given `<working directory>/~/runs` for `runs_dir=~/runs`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.sh.j2").write_text("{% include 'default.sh.j2' %}")
    container = ContainerSpec(kind="apptainer", image="/x.sif")
    made = spec("~/runs", cluster={"container": container, "template": "~/mine.sh.j2"})
    assert script.problems(made) == []
    place = script.ScriptPlace(tmp_path / "s.sh", "a run", run_dir=tmp_path / "runs" / "r")
    text = script.body(made, task(made).plan, place)
    assert f"--bind {tmp_path}/runs " in text
    assert "~/" not in text


def test_a_misspelt_name_in_a_template_is_an_error(tmp_path: Path) -> None:
    own = tmp_path / "mine.sh.j2"
    own.write_text("{{ run_dri }}")
    with pytest.raises(jinja2.UndefinedError):
        rendered(cluster={"template": str(own)})


def test_a_newline_that_reaches_the_template_is_refused() -> None:
    with pytest.raises(BadInput):
        rendered(path="/srv/a\nrm -rf /")
