from __future__ import annotations

from types import SimpleNamespace

from air_hpc.agent.xids import hand_out, watch_xids
from air_hpc.probes.xid import Xid


def test_an_error_is_noted_with_the_worker_that_has_the_device() -> None:
    workers = [SimpleNamespace(xids=[]), SimpleNamespace(xids=[])]
    hand_out([Xid("GPU-b", 5, 79, 1.0, local_rank=1)], workers)
    assert [len(worker.xids) for worker in workers] == [0, 1]
    assert workers[1].xids[0]["xid"] == 79


def test_an_error_of_an_unknown_device_is_noted_with_all() -> None:
    workers = [SimpleNamespace(xids=[]), SimpleNamespace(xids=[])]
    hand_out([Xid(None, None, 79, 1.0), Xid("GPU-z", 9, 31, 1.0, local_rank=7)], workers)
    assert [[entry["xid"] for entry in worker.xids] for worker in workers] == [[79, 31]] * 2


def test_a_cpu_has_nothing_to_watch() -> None:
    assert watch_xids("cpu", {}) is None
