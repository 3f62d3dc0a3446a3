from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from air_hpc.config.build import build
from air_hpc.config.compose import Composer
from air_hpc.config.spec import RunSpec
from air_hpc.errors import BadInput, Problem
from air_hpc.resources import conf_dir

SHARED = Composer()


def problems_of(*overrides: str, composer: Composer = SHARED) -> list[Problem]:
    with pytest.raises(BadInput) as caught:
        composer.compose(overrides)
    return list(caught.value.problems)


def test_groups_and_values_and_the_names_scripts_rely_on() -> None:
    spec = SHARED.compose(
        [
            "model=llama_8b",
            "parallelism=fsdp",
            "engine=native",
            "accelerator=h100_sxm",
            "cluster=slurm",
            "launch.nodes=16",
            "launch.devices_per_node=8",
            "launch.partition=gpu",
            "launch.account=0123",
            "launch.qos=high",
            "launch.time_limit_min=60",
            "data.sequence_length=8192",
            "train.steps=10",
            "train.global_batch_size=128",
            "train.micro_batch_size=1",
            "train.seed=7",
            "optimizer.lr=3e-4",
            "checkpoint.interval_steps=5",
            "checkpoint.keep_last=1",
            "runs_dir=/shared/runs",
            "tracking.uri=https://mlflow.example",
            "parallelism.pp=1",
            "parallelism.dp_replicate=1",
            "parallelism.dp_shard=128",
            "parallelism.cp=1",
            "parallelism.tp=1",
            "parallelism.ep=1",
        ]
    )
    assert spec.model.layers == 32
    assert spec.model.rope_scaling is not None
    assert spec.launch.account == "0123"
    assert spec.optimizer.lr == 3e-4
    assert spec.parallelism.dp_shard == 128


def test_an_experiment_changes_options_and_values_and_the_command_line_wins() -> None:
    spec = SHARED.compose(["experiment=llama_8b_fsdp", "train.steps=3", "accelerator=b200"])
    assert (spec.model.name, spec.launch.nodes, spec.schedule.name) == ("llama_8b", 16, "wsd")
    assert (spec.train.steps, spec.accelerator.name) == (3, "b200")
    assert SHARED.compose(["experiment=null"]) == SHARED.compose([])
    assert SHARED.compose(["+experiment=smoke"]) == SHARED.compose(["experiment=smoke"])


def test_every_mistake_is_one_problem_in_one_pass() -> None:
    wrong = {
        "modle=tiny": "Did you mean model?",
        "model=tinny": "Did you mean tiny?",
        "train.stepz=3": "Did you mean train.steps?",
        "experimen=smoke": "Did you mean experiment?",
        "train.steps=abc": "a whole number",
        "train.lr=3": "Did you mean optimizer.lr?",
        "optimizer.lr=-1": "above 0",
        "a=[1": "key=value",
        "train.seed": "needs a value",
        "hydra.run.dir=x": "no effect",
        "launch.nodes=1,2": "Add -m",
        "launch.mail_type=END,FAIL": "\"launch.mail_type='END,FAIL'\"",
        "launch.qos=range(1,3)": "Add -m",
        "runs_dir=${oc.env:NOT_SET_ANYWHERE}": "NOT_SET_ANYWHERE",
        "schedule.name=cosin": "Did you mean cosine?",
        "~foo": "no such key",
        "+launch.devices_per_node=3": "launch.devices_per_node=3",
        "train.compile=1": "true or false",
        "launch.comment='a\nb'": "one line",
        "model@there=tiny": "model",
        "foo@there=tiny": "no such group",
        "++data=python_stdlib": "not for groups",
        "=3": "needs a key",
        "launch.nodes.deep=3": "unknown key",
        "~launch.gpus=gres": "its value is auto",
        "parallelism.tp=true": "a whole number",
        "launch.reservation=???": "a value is needed",
    }
    problems = problems_of(*wrong)
    assert len(problems) == len(wrong), "\n".join(map(str, problems))
    texts = [str(problem) for problem in problems]
    for override, expected in wrong.items():
        assert any(expected in text for text in texts), f"{override}: no problem says {expected}"
    assert not any("\n" in text for text in texts), "each problem is one line"


GOOD_KEYS = ("train.steps", "launch.nodes", "checkpoint.keep_last", "data.sequence_length")


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.sampled_from(GOOD_KEYS)),
    st.sets(st.sampled_from(["model", "cluster", "schedule"])),
    st.sets(st.sampled_from(["nosuch.a", "trainn.steps", "launch.node", "zzz"])),
    st.randoms(),
)
def test_k_injected_errors_are_k_problems(
    bad_types: set[str], bad_options: set[str], bad_keys: set[str], order: object
) -> None:
    wrong = [f"{key}=-x" for key in sorted(bad_types)]
    wrong += [f"{group}=nosuch" for group in sorted(bad_options)]
    wrong += [f"{key}=1" for key in sorted(bad_keys)]
    fine = ["train.seed=3", "optimizer=sgd"]
    mixed = wrong + fine
    order.shuffle(mixed)  # type: ignore[attr-defined]
    _, problems = SHARED.try_compose(mixed)
    assert len(problems) == len(wrong)


def test_what_has_a_problem_holds_its_default_and_the_rest_is_as_asked() -> None:
    spec, problems = SHARED.try_compose(["train.steps=x", "train.seed=4", "model=nosuch"])
    assert {p.key for p in problems} == {"train.steps", "model"}
    assert (spec.train.steps, spec.train.seed, spec.model.name) == (200, 4, "tiny")


def test_override_grammar_of_adding_forcing_and_deleting() -> None:
    spec = SHARED.compose(
        [
            "+launch.sbatch.licenses='a:1'",
            "++launch.nodes=2",
            "launch.sbatch.nice=5",
            "cluster.env={A: b}",
            "cluster.env.C=d",
            "~launch.gpus",
            "~train.steps=200",
            "cluster.modules=[cuda,nccl]",
        ]
    )
    assert spec.launch.sbatch == {"licenses": "a:1", "nice": 5}
    assert spec.launch.nodes == 2
    assert spec.cluster.env == {"A": "b", "C": "d"}
    assert spec.cluster.modules == ("cuda", "nccl")
    assert spec.launch.gpus == "auto"


@pytest.mark.parametrize(
    ("written", "text"),
    [("0123", "0123"), ("1_000", "1_000"), ("64", "64"), ("true", "true"), ("'x y'", "x y")],
)
def test_a_key_that_takes_text_gets_the_letters_as_written(written: str, text: str) -> None:
    assert SHARED.compose([f"launch.account={written}"]).launch.account == text


def test_interpolations_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_MINE", "/scratch/me")
    spec = SHARED.compose(
        ["runs_dir=${oc.env:SCRATCH_OF_MINE}/runs", "checkpoint.interval_steps=${train.steps}"]
    )
    assert spec.runs_dir == "/scratch/me/runs"
    assert spec.checkpoint.interval_steps == spec.train.steps


@pytest.mark.parametrize(
    "override",
    [
        "launch.comment='${'",
        "launch.comment='${a'",
        "cluster.modules=['${']",
        "cluster.modules=[a,'${nosuch}']",
        "launch.comment='${foo:1}'",
        "launch.comment=${launch.comment}",
        "launch.sbatch={a: '${launch}'}",
        "launch.comment='${oc.env:}'",
        "launch.comment='${hydra:job.name}'",
        "launch.comment='${...x}'",
        "model=${nosuch}",
        "experiment='${'",
        "hydra.searchpath=3",
    ],
)
def test_an_interpolation_that_leads_nowhere_is_one_problem(override: str) -> None:
    problems = problems_of(override, "train.stepz=1")
    assert len(problems) == 2, "\n".join(map(str, problems))
    assert SHARED.try_compose_sweep([override, "train.stepz=1"])[1] == problems


def test_an_escaped_interpolation_is_its_characters() -> None:
    assert SHARED.compose(["launch.comment='\\${x}'"]).launch.comment == "${x}"


HYDRA_OVERRIDES = st.lists(
    st.sampled_from(
        [
            "model=llama_1b",
            "model=llama_8b",
            "parallelism=hsdp",
            "experiment=smoke",
            "cluster=slurm",
            "~tracking",
            "train.steps=7",
            "train.steps=9",
            "optimizer.lr=1e-4",
            "model.dim=64",
            "+launch.sbatch.a=1",
            "++launch.sbatch.b=x",
            "++launch.sbatch={c: 1}",
            "cluster.modules=[a,b]",
            "~checkpoint.keep_every_steps",
            "launch={nodes: 3, qos: q}",
            "launch.mem=null",
            "runs_dir=${oc.env:HOME}/x",
        ]
    ),
    max_size=6,
    unique=True,
)


@settings(max_examples=25, deadline=None)
@given(HYDRA_OVERRIDES)
def test_a_good_set_of_overrides_means_what_hydra_makes_of_it(overrides: list[str]) -> None:
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            theirs = OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)
    except Exception:  # Hydra refuses some sets (a null deleted, an option chosen twice)
        return
    built = build(RunSpec, theirs)  # type: ignore[arg-type]
    assert built.problems == []
    assert SHARED.compose(overrides) == built.value


def test_cfg_job_prints_the_config_as_composed_and_as_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HERE", "/here")
    raw = SHARED.job_yaml(["runs_dir=${oc.env:HERE}"])
    assert OmegaConf.create(raw)._get_node("runs_dir")._value() == "${oc.env:HERE}"  # type: ignore[union-attr]
    resolved = SHARED.job_yaml(["runs_dir=${oc.env:HERE}"], resolve=True)
    assert OmegaConf.create(resolved).runs_dir == "/here"


@pytest.fixture(params=["plain", "a folder, of 'mine' ü"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / str(request.param)
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "mysite.yaml").write_text("name: mysite\nkind: slurm\nmodules: [cuda]\n")
    (folder / "mine.yaml").write_text("defaults:\n  - config\n  - _self_\ntrain:\n  steps: 5\n")
    return folder


def test_a_site_of_the_users_own_is_found_and_may_leave_keys_out(site: Path) -> None:
    composer = Composer(site)
    spec = composer.compose(["cluster=mysite", "cluster.grace_s=5"])
    assert (spec.cluster.modules, spec.cluster.grace_s) == (("cuda",), 5.0)
    (problem,) = problems_of("cluster=mysit", composer=composer)
    assert "mysite" in problem.allowed
    assert problem.hint == "Did you mean mysite?"


def test_a_root_config_of_the_users_own(site: Path) -> None:
    assert Composer(site, "mine").compose([]).train.steps == 5
    with pytest.raises(BadInput, match=r"Did you mean mine"):
        Composer(site, "minee")
    with pytest.raises(BadInput, match=r"no such folder"):
        Composer(site / "nowhere")


@pytest.mark.parametrize(
    "body",
    [
        "name: [unclosed",
        "- a list",
        "defaults:\n  - /model: nosuch\nname: x\n",
        "name: a\nname: b\n",
        "a: ${b",
        "\t",
    ],
)
def test_a_broken_file_of_the_users_is_a_problem_and_no_traceback(site: Path, body: str) -> None:
    (site / "cluster" / "broken.yaml").write_text(body)
    problems = problems_of("cluster=broken", "train.stepz=1", composer=Composer(site))
    assert any("stepz" in str(p) for p in problems), "the other mistake is told as well"
    assert len(problems) >= 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=4))
def test_no_text_whatever_raises_anything_but_bad_input(texts: list[str]) -> None:
    SHARED.try_compose(texts)
    SHARED.try_compose_sweep(texts)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["train.steps", "launch.sbatch", "model", "cluster.env.X", "launch.comment"]),
    st.text(max_size=20),
)
def test_no_value_whatever_raises_anything_but_bad_input(key: str, value: str) -> None:
    SHARED.try_compose([f"{key}={value}"])


def test_the_folder_of_runs_is_the_environments_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once only `status` and its like read AIR_HPC_RUNS_DIR: runs went to ./runs, unseen."""
    monkeypatch.delenv("AIR_HPC_RUNS_DIR", raising=False)
    assert Composer().compose([]).runs_dir == "runs"
    monkeypatch.setenv("AIR_HPC_RUNS_DIR", "/shared/me/runs")
    assert Composer().compose([]).runs_dir == "/shared/me/runs"
    assert Composer().compose(["runs_dir=here"]).runs_dir == "here"
