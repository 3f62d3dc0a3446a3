import grp
import os
from pathlib import Path

from air_hpc.rundir.atomic import write_atomic
from air_hpc.rundir.events import Kind, record
from air_hpc.rundir.layout import create_run_dir
from air_hpc.session.session import Session


def test_what_a_shared_run_makes_is_the_groups_to_read_and_write(tmp_path: Path) -> None:
    """Only the skeleton's folders once were shared: their files stayed 0600, checkpoints 0700."""
    group = grp.getgrgid(os.getgid()).gr_name
    before = os.umask(0o077)
    try:
        run = create_run_dir(tmp_path, "shared", group=group)
        session = Session.standalone(run)
        session.begin_step(1)
        session.end_step(1, {"train/loss": 1.0})
        folder = session.begin_save(1)
        record(run, "submit", Kind.SUBMITTED)
        write_atomic(run.run_yaml, b"")
        session.finished(1)
    finally:
        os.umask(before)
    private = [
        path
        for path in [run.path, *run.path.rglob("*")]
        if path.stat().st_mode & 0o777 != (0o770 if path.is_dir() else 0o660)
    ]
    assert private == []
    assert folder.is_dir()


def test_what_a_private_run_makes_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        run = create_run_dir(tmp_path, "private")
        session = Session.standalone(run)
        session.begin_save(1)
        session.finished(1)
    finally:
        os.umask(before)
    assert all(not path.stat().st_mode & 0o077 for path in [run.path, *run.path.rglob("*")])
