import json
import time
from pathlib import Path

import pytest

from air_hpc.errors import EnvironmentFailure
from air_hpc.slurm import snapshot
from air_hpc.slurm.version import SlurmVersion
from tests.slurm import recorded

VERSION = "22.05.8"


@pytest.fixture
def site():
    return snapshot.parse(recorded.texts(VERSION), taken_at=1.0)


def test_the_configuration_that_matters(site) -> None:
    config = site.config
    assert config.version == SlurmVersion(22, 5, 8)
    assert config.cluster_name == "devcluster"
    assert config.max_array_size == 1001
    assert config.max_array_tasks is None
    assert config.job_requeue is False
    assert config.kill_wait_s == 5
    assert config.accounting
    assert set(config.accounting_enforce) == {"associations", "limits", "qos"}


def test_partitions(site) -> None:
    low, high = site.partition("low"), site.partition("high")
    assert site.partition(None) == low
    assert low.grace_time_s == 10
    assert low.max_time_min is None
    assert low.default_time_min == 60
    assert low.total_nodes == 4
    assert high.preempt_mode == "OFF"
    assert site.partition("nosuch") is None


def test_nodes(site) -> None:
    nodes = site.nodes_of("low")
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert nodes[0].devices() == 2
    assert nodes[0].devices("h100") == 2
    assert nodes[0].devices("a100") == 0
    assert nodes[0].cpus == 8
    assert nodes[0].memory_bytes == 65536 * 1024**2
    assert nodes[0].usable


def test_associations_and_qos(site) -> None:
    (association,) = site.associations
    assert association.account == "research"
    assert set(association.qos) == {"limited", "normal"}
    assert association.default_qos == "normal"
    assert site.named_qos("limited").max_submit_jobs_per_user == 20


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("IDLE*", True),
        ("DOWN*", False),
        ("IDLE+DRAIN", False),
        ("ALLOCATED+DRAIN*", False),
        ("FUTURE", False),
    ],
)
def test_node_states_with_slurms_flags(state: str, usable: bool) -> None:
    (node,) = snapshot.parse_nodes(f"NodeName=n1 CPUTot=8 State={state} Partitions=low ")
    assert node.usable is usable


def test_max_array_tasks_is_read_from_the_schedulers_parameters() -> None:
    text = recorded.text(VERSION, "config").replace(
        "SchedulerParameters     = ", "SchedulerParameters     = max_array_tasks=50,"
    )
    assert snapshot.parse_config(text).max_array_tasks == 50


class TestCache:
    def test_one_question_serves_many_submissions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        monkeypatch.setattr(
            snapshot, "ask", lambda timeout_s: asked.append(1) or recorded.texts(VERSION)
        )
        cache = tmp_path / "site.json"
        first = snapshot.take(cache=cache)
        assert snapshot.take(cache=cache) == first
        assert len(asked) == 1

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "[]",
            lambda text: json.dumps({**json.loads(text), "schema_version": 99}),
            lambda text: json.dumps({**json.loads(text), "key": "another:user"}),
            lambda text: json.dumps(
                {**json.loads(text), "texts": {"taken_at": str(time.time() - 9999)}}
            ),
            lambda text: json.dumps(
                {**json.loads(text), "texts": {"taken_at": str(time.time() + 9999)}}
            ),
        ],
    )
    def test_a_damaged_foreign_or_old_cache_is_asked_anew(
        self, damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        monkeypatch.setattr(
            snapshot, "ask", lambda timeout_s: asked.append(1) or recorded.texts(VERSION)
        )
        cache = tmp_path / "site.json"
        snapshot.take(cache=cache)
        cache.write_text(damage(cache.read_text()))
        snapshot.take(cache=cache)
        assert len(asked) == 2

    def test_a_cache_that_cannot_be_written_is_no_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshot, "ask", lambda timeout_s: recorded.texts(VERSION))
        assert snapshot.take(cache=tmp_path / "absent" / "site.json").user == "airhpc"


def test_an_accounting_that_is_down_holds_a_submission_up_for_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each command that submits waited a minute for slurmdbd, and then went on without it."""
    waits = {}

    def read(argv: tuple[str, ...], *, timeout_s: float) -> str:
        waits[argv[0]] = timeout_s
        if argv[0] == "sacctmgr":
            raise EnvironmentFailure("Unable to connect to database")
        return recorded.text("22.05.8", argv[-1])

    monkeypatch.setattr(snapshot.command, "read", read)
    texts = snapshot.ask(60)
    assert waits == {"scontrol": 60, "sacctmgr": 10}
    assert snapshot.parse(texts, taken_at=0).associations is None
