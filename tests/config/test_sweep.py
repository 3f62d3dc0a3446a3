from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from air_hpc.config import compose as compose_module
from air_hpc.config.compose import Composer
from air_hpc.config.groups import ConfigFolders
from air_hpc.errors import BadInput

AXES = st.lists(
    st.sampled_from(
        [
            "model=tiny,llama_1b",
            "model=glob(llama_*0b)",
            "optimizer.lr=1e-3,3e-4",
            "train.seed=range(1,4)",
            "optimizer.weight_decay=range(0.0,0.3,0.1)",
            "launch.comment='a,b'",
            "launch.account=choice(01,1_0)",
            "runs_dir=${oc.env:HOME}/a,/b",
            "schedule=cosine,wsd",
            "train.steps=100",
            "cluster.modules=[a],[b,c]",
            "+launch.sbatch.nice=1,2",
            "launch.mail_type='END','FAIL x'",
        ]
    ),
    max_size=4,
    unique_by=lambda text: text.partition("=")[0],
)
SHARED = Composer()


@settings(max_examples=25, deadline=None)
@given(AXES)
def test_each_task_equals_composing_its_overrides_alone(axes: list[str]) -> None:
    tasks = SHARED.compose_sweep(axes)
    assert [task.index for task in tasks] == list(range(len(tasks)))
    for task in tasks:
        assert SHARED.compose(task.overrides) == task.spec


def test_the_first_override_varies_slowest_and_fixed_ones_stay() -> None:
    tasks = SHARED.compose_sweep(["optimizer.lr=1e-3,3e-4", "train.steps=5", "train.seed=1,2"])
    assert [(t.spec.optimizer.lr, t.spec.train.seed) for t in tasks] == [
        (1e-3, 1),
        (1e-3, 2),
        (3e-4, 1),
        (3e-4, 2),
    ]
    assert {t.spec.train.steps for t in tasks} == {5}
    assert tasks[0].overrides == ("optimizer.lr=0.001", "train.steps=5", "train.seed=1")


def test_no_sweep_at_all_is_one_task() -> None:
    (task,) = SHARED.compose_sweep(["train.seed=3"])
    assert task.spec == SHARED.compose(["train.seed=3"])


def test_options_are_composed_once_for_each_distinct_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    real = compose_module.composed

    def counted(folders: ConfigFolders, name: str, choices: tuple[str, ...]) -> dict[str, object]:
        asked.append(choices)
        return real(folders, name, choices)

    monkeypatch.setattr(compose_module, "composed", counted)
    tasks = Composer().compose_sweep(["train.seed=range(0,40)", "model=tiny,llama_1b"])
    assert len(tasks) == 80
    assert asked == [("model=tiny",), ("model=llama_1b",)]


def test_tasks_share_nothing_that_can_change() -> None:
    one, two = SHARED.compose_sweep(["train.seed=1,2"])
    one.spec.launch.sbatch["x"] = 1  # type: ignore[index]
    assert two.spec.launch.sbatch == {}


def test_progress_is_told_of_every_task() -> None:
    told: list[tuple[int, int]] = []
    SHARED.compose_sweep(["train.seed=1,2,3"], progress=lambda *counts: told.append(counts))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_mistake_of_many_tasks_is_told_once_beside_all_others() -> None:
    with pytest.raises(BadInput) as caught:
        SHARED.compose_sweep(
            [
                "train.seed=range(0,20)",
                "model=tiny,tinny",
                "train.steps=5,x",
                "optimizer.lr=interval(0,1)",
                "modle=a,b",
                "data=glob(nosuch*)",
                "train.log_interval_steps=range(0,9999999)",
            ]
        )
    problems = [str(p) for p in caught.value.problems]
    assert len(problems) == 7, "\n".join(problems)  # modle is wrong once for each of its values
    assert sum("tinny" in p for p in problems) == 1


def test_a_sweep_too_large_to_be_meant_is_refused_before_it_is_made() -> None:
    with pytest.raises(BadInput, match="1000000 tasks"):
        SHARED.compose_sweep(["train.seed=range(0,1000)", "train.steps=range(1,1001)"])
