"""The batch script under bash without Slurm: srun, module and conda are stand-ins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from air_hpc.launch import script
from tests.launch.making import fake_cluster, spec, task

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@"
"""
ORPHANING = """#!/bin/bash
read -r _ _ _ above _ < /proc/$PPID/stat
kill -KILL "$above"
"""
"""What starts the script dies, as a slurmstepd does on a node that Slurm loses."""
SITE = """
if [[ $0 == */script.sh ]]; then trap 'echo $? > "${0%/*}/status"' EXIT; fi
module() { [[ $2 != missing ]] && export LOADED="${LOADED:-}$2;"; }
conda() {
  if [[ $1 == shell.bash ]]; then echo "true"; return; fi
  export CONDA_DEFAULT_ENV=$2
}
"""


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs of 'us' $HOME #1" / "a run"
        (self.run_dir / "attempts" / "intents").mkdir(parents=True)
        (self.run_dir / "run.yaml").touch()
        (folder / "bin").mkdir()
        self.program("srun", SRUN)
        (folder / "site.sh").write_text(SITE)

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(
        self,
        behaviour: str = "finish",
        environ: dict[str, str] | None = None,
        continuation: str = "requeue",
        orphaned: bool = False,
        **cluster: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run the script; `orphaned`: what started it is gone before it ends."""
        chosen = fake_cluster(behaviour, **cluster)
        made = spec(self.run_dir.parent, cluster=chosen, continuation=continuation)
        path = self.folder / "script.sh"
        place = script.ScriptPlace(path=path, title="a run", run_dir=self.run_dir)
        path.write_text(script.body(made, task(made).plan, place))
        words = ["bash", str(path)]
        if orphaned:
            self.program("srun", ORPHANING + SRUN.partition("\n")[2])
            words = ["bash", "-c", 'bash "$0"; :', str(path)]
        done = subprocess.run(
            words,
            env={
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "BASH_ENV": str(self.folder / "site.sh"),
                "SLURM_JOB_ID": "7",
                **(environ or {}),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if orphaned:
            done.returncode = int((self.folder / "status").read_text())
        return done

    def scontrol(self, *refused: str, state: str = "RUNNING", restarts: int = 0) -> Path:
        """A stand-in that writes its calls down, refuses the first of `refused`, and knows the job
        by `state` and `restarts`."""
        calls = self.folder / "scontrol.calls"
        lines = [
            "#!/bin/bash",
            f'echo "$@" >> {calls}',
            f'[[ $1 == -o ]] && {{ echo "JobId=7 JobState={state} Restarts={restarts}"; exit 0; }}',
            *(f'[[ "$*" == "{words}" && ! -e {calls}.{n} ]] && {{ touch {calls}.{n}; exit 1; }}'
              for n, words in enumerate(refused)),
            "exit 0",
        ]  # fmt: skip
        self.program("scontrol", "\n".join(lines) + "\n")
        return calls

    @property
    def start(self) -> dict[str, Any]:
        first = (self.run_dir / "attempts" / "seen").read_text().splitlines()[0]
        found: dict[str, Any] = json.loads(first)
        return found


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_modules_are_loaded_in_order_before_the_setup_lines(site: Site) -> None:
    done = site.run(modules=("cuda/12", "nc cl"), setup=('export SITE="$LOADED done"',))
    assert done.returncode == 0, done.stderr
    assert site.start["environ"]["SITE"] == "cuda/12;nc cl; done"


def test_a_module_that_is_missing_ends_the_job_with_its_name(site: Site) -> None:
    done = site.run(modules=("missing",))
    assert done.returncode == 1
    assert "module load missing failed" in done.stderr
    assert not (site.run_dir / "attempts" / "seen").exists()


def test_a_conda_environment_is_activated(site: Site) -> None:
    done = site.run(conda_env="my env", setup=('export SITE="$CONDA_DEFAULT_ENV"',))
    assert done.returncode == 0, done.stderr
    assert site.start["environ"]["SITE"] == "my env"


def test_a_virtual_environment_is_activated_or_missed_by_name(site: Site) -> None:
    done = site.run(venv="/no such/env")
    assert done.returncode == 1
    assert "no virtual environment at /no such/env" in done.stderr
    (site.folder / "an env" / "bin").mkdir(parents=True)
    (site.folder / "an env" / "bin" / "activate").write_text("export SITE=active\n")
    assert site.run(venv=str(site.folder / "an env")).returncode == 0
    assert site.start["environ"]["SITE"] == "active"


def test_values_of_the_environment_arrive_exactly(site: Site) -> None:
    value = 'it\'s $HOME `id` \\ "x" * ü'
    assert site.run(env={"SITE": value}).returncode == 0
    assert site.start["environ"]["SITE"] == value


def test_a_python_path_of_the_user_comes_after_the_runs_code(site: Site) -> None:
    site.run(environ={"PYTHONPATH": "/mine"})
    parts = site.start["environ"]["PYTHONPATH"].split(":")
    assert parts[0] == f"{site.run_dir}/code"
    assert parts[-1] == "/mine"
    assert str(Path(sys.executable).parent) not in parts


def test_a_run_directory_that_is_not_there_is_said_plainly(site: Site) -> None:
    (site.run_dir / "run.yaml").unlink()
    done = site.run()
    assert done.returncode == 1
    assert "no run directory at" in done.stderr
    assert "shares" in done.stderr


@pytest.mark.parametrize(("behaviour", "status"), [("stop", 93), ("fail", 5), ("unheard-of", 3)])
def test_the_status_of_the_script(site: Site, behaviour: str, status: int) -> None:
    assert site.run(behaviour).returncode == status


def test_a_requeue_is_insisted_on_while_the_controller_refuses(site: Site) -> None:
    count = site.folder / "count"
    site.program("scontrol", f'#!/bin/bash\necho "$@" >> {count}\n(( $(wc -l < {count}) > 3 ))\n')
    done = site.run("requeue", {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"})
    assert done.returncode == 0
    # Nothing is asked for before Slurm has said that this start is still the job's.
    asked, refused = "-o show job 5_0", "requeue 5_0"
    assert count.read_text().splitlines() == [asked, asked, asked, asked, refused]


def test_a_script_that_outlived_its_start_does_not_requeue_the_next_one(site: Site) -> None:
    """Slurm lost its node, and had started the job elsewhere: the script brought that down."""
    calls = site.scontrol(restarts=3)
    for behaviour, status in (("requeue", 0), ("killed", 137)):
        done = site.run(behaviour, {"SLURM_RESTART_COUNT": "2"})
        assert done.returncode == status
    assert set(calls.read_text().splitlines()) == {"-o show job 7"}


@pytest.mark.parametrize(("behaviour", "status"), [("done", 0), ("stop", 93), ("fail", 5)])
@pytest.mark.parametrize(("restarts", "ended"), [(0, ["7"]), (1, [])])
def test_a_script_without_a_slurmstepd_ends_its_job_by_name(
    site: Site, behaviour: str, status: int, restarts: int, ended: list[str]
) -> None:
    """Under --no-kill the job of a lost batch host stayed RUNNING after its end."""
    site.scontrol(restarts=restarts)
    count = site.folder / "count"
    site.program("scancel", f'#!/bin/bash\necho "$@" >> {count}\n')
    done = site.run(behaviour, {"ENVIRONMENT": "BATCH"}, orphaned=True)
    assert done.returncode == status, done.stderr
    assert (count.read_text().splitlines() if count.exists() else []) == ended


def test_a_script_in_an_allocation_of_the_users_leaves_it_to_them(site: Site) -> None:
    site.scontrol()
    count = site.folder / "count"
    site.program("scancel", f'#!/bin/bash\necho "$@" >> {count}\n')
    assert site.run("done", orphaned=True).returncode == 0
    assert not count.exists()


def test_a_resubmission_that_was_taken_is_not_repeated(site: Site) -> None:
    """sbatch took the job and then said that it timed out."""
    count = site.folder / "count"
    site.program("sbatch", f'#!/bin/bash\nenv >> {count}.env; echo "$@" >> {count}; exit 1\n')
    site.program("squeue", f"#!/bin/bash\n[[ -e {count} ]] && echo 12\nexit 0\n")
    leaks = {"SLURM_CPU_BIND": "x", "SBATCH_PARTITION": "y", "SLURM_CONF": "/etc/slurm.conf"}
    done = site.run("resubmit", {**leaks, "SLURM_JOB_NAME": "a job"})
    assert done.returncode == 0, done.stderr
    (line,) = count.read_text().splitlines()
    assert "--job-name=a job.again-7-0" in line
    assert "--dependency=afterany:7" in line
    environ = Path(f"{count}.env").read_text()
    assert "SLURM_CONF=" in environ
    assert "SLURM_CPU_BIND" not in environ
    assert "SBATCH_PARTITION" not in environ


def test_nothing_is_submitted_again_while_squeue_cannot_say_whether_it_was(site: Site) -> None:
    """Once an squeue that failed was taken for one that found no job."""
    count = site.folder / "count"
    site.program("sbatch", f'#!/bin/bash\necho "$@" >> {count}; exit 1\n')
    busy = f"#!/bin/bash\necho x >> {count}.asked\n(( $(wc -l < {count}.asked) == 2 )) && exit 1\n"
    site.program("squeue", f"{busy}[[ -e {count} ]] && echo 12\nexit 0\n")
    assert site.run("resubmit", {"SLURM_JOB_NAME": "a job"}).returncode == 0
    assert len(count.read_text().splitlines()) == 1


def test_the_name_of_a_job_that_is_submitted_again_and_again_does_not_grow(site: Site) -> None:
    count = site.folder / "count"
    site.program("sbatch", f'#!/bin/bash\necho "$@" >> {count}; echo 12\n')
    site.program("squeue", "#!/bin/bash\n")
    assert site.run("resubmit", {"SLURM_JOB_NAME": "a job.again-5-0"}).returncode == 0
    assert "--job-name=a job.again-7-0 " in count.read_text()


def test_the_word_of_an_earlier_start_under_the_same_job_is_not_obeyed(site: Site) -> None:
    """It once had srun killed after 20 s, and the job requeued."""
    intent = site.run_dir / "attempts" / "intents" / "7.0"
    intent.write_text("stop\n")
    assert site.run("finish").returncode == 0
    assert not intent.exists()


@pytest.mark.parametrize(("exclude", "told"), [("n3,n[5-6]", "n3,n[5-6]"), ("", "")])
def test_a_requeued_job_is_told_what_to_avoid_once_it_is_pending(
    site: Site, exclude: str, told: str
) -> None:
    update = f"update jobid=5_0 excnodelist={told}"
    calls = site.scontrol(update)
    environ = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}
    done = site.run(f"requeue|exclude={exclude}", environ)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == ["-o show job 5_0", "requeue 5_0", update, update]


def test_a_requeue_without_a_list_leaves_the_jobs_own(site: Site) -> None:
    calls = site.scontrol()
    assert site.run("requeue").returncode == 0
    assert calls.read_text().splitlines() == ["-o show job 7", "requeue 7"]


def test_a_list_that_slurm_never_takes_is_said_and_fails_nothing(site: Site) -> None:
    site.program("scontrol", "#!/bin/bash\n[[ $1 == update ]] || exit 0\necho no such node; exit 1")
    site.program("sleep", "#!/bin/bash\nexec /bin/sleep 0.1\n")
    done = site.run("requeue|exclude=n3")
    assert done.returncode == 0
    assert "7 could not be told to avoid n3: no such node" in done.stderr


@pytest.mark.parametrize("line", ["n3 n4", "n3; reboot", "$(reboot)", "n3/x", "-x=y'"])
def test_a_list_that_names_no_nodes_is_not_given_to_slurm(site: Site, line: str) -> None:
    calls = site.scontrol()
    done = site.run(f"requeue|exclude={line}")
    assert done.returncode == 0
    assert calls.read_text().splitlines() == ["-o show job 7", "requeue 7"]
    assert "not a list of nodes" in done.stderr


def test_a_resubmitted_job_avoids_the_nodes_too(site: Site) -> None:
    count = site.folder / "count"
    site.program("sbatch", f'#!/bin/bash\necho "$@" >> {count}; echo 12\n')
    site.program("squeue", "#!/bin/bash\n")
    assert site.run("resubmit|exclude=n3,n5").returncode == 0
    assert "--exclude=n3,n5 " in count.read_text()
    (site.run_dir / "attempts" / "left").unlink()
    assert site.run("resubmit|exclude=", {"SLURM_RESTART_COUNT": "1"}).returncode == 0
    assert "exclude" not in count.read_text().splitlines()[1]


def test_a_finished_run_ends_the_job_well_whatever_srun_says(site: Site) -> None:
    """srun may hang on a dead node, and is then killed."""
    assert site.run("done").returncode == 0


def test_a_run_whose_agents_were_killed_is_started_again(site: Site) -> None:
    """It once ended FAILED, and nobody started it again."""
    calls = site.scontrol()
    assert site.run("killed").returncode == 0
    assert calls.read_text().splitlines() == ["-o show job 7", "-o show job 7", "requeue 7"]


def test_a_run_whose_agents_were_killed_is_submitted_again(site: Site) -> None:
    site.scontrol()
    count = site.folder / "count"
    site.program("sbatch", f'#!/bin/bash\necho "$@" >> {count}; echo 12\n')
    site.program("squeue", "#!/bin/bash\n")
    assert site.run("killed", continuation="resubmit").returncode == 0
    assert "--dependency=afterany:7" in count.read_text()


@pytest.mark.parametrize("continuation", ["chain", "none"])
def test_where_nothing_is_to_follow_a_killed_agent_ends_the_job(
    site: Site, continuation: str
) -> None:
    calls = site.scontrol()
    assert site.run("killed", continuation=continuation).returncode == 137
    assert calls.read_text() == "-o show job 7\n"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", ""])
def test_a_job_that_is_being_ended_is_not_started_again(site: Site, state: str) -> None:
    calls = site.scontrol(state=state)
    assert site.run("killed").returncode == 137
    assert calls.read_text() == "-o show job 7\n"


def test_agents_that_left_no_trace_are_not_started_for_ever(site: Site) -> None:
    """No start could count them, so the script does: three in a row are killed by chance."""
    calls = site.scontrol()
    assert [site.run("killed-early").returncode for _ in range(4)] == [0, 0, 0, 137]
    assert calls.read_text().splitlines().count("requeue 7") == 3
    (site.run_dir / "tokens" / "1.1").mkdir(parents=True)
    assert site.run("killed-early").returncode == 0, "a start in between was one of its own"


def test_a_list_that_sbatch_refuses_does_not_end_the_run(site: Site) -> None:
    """Slurm refuses a whole list for one node that it no longer has."""
    count = site.folder / "count"
    refuse = "for x; do [[ $x == --exclude=* ]] && exit 1; done"
    site.program("sbatch", f'#!/bin/bash\necho "$@" >> {count}; {refuse}; echo 12\n')
    site.program("squeue", "#!/bin/bash\n")
    site.program("sleep", "#!/bin/bash\nexec /bin/sleep 0.1\n")
    done = site.run("resubmit|exclude=gone")
    assert done.returncode == 0
    assert "without --exclude=gone" in done.stderr
    assert "exclude" not in count.read_text().splitlines()[-1]
