import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_hpc.slurm import jobs, records
from air_hpc.slurm.records import Gres

PRINTABLE = st.text(string.ascii_letters + string.digits + " =:,()[]'\"%", min_size=1, max_size=40)


@given(name=PRINTABLE, comment=PRINTABLE)
def test_what_a_user_wrote_never_passes_for_slurms_word(name: str, comment: str) -> None:
    line = (
        f"JobId=7 JobName={name} UserId=u(1) GroupId=g(1) JobState=RUNNING Reason=None Restarts=2 "
        f"NodeList=n[1-2] WorkDir=/home/u Comment={comment}  StdErr=/dev/null Power= "
    )
    (job,) = jobs.parse_show_job(line)
    assert (job.state, job.restarts, job.nodes) == ("RUNNING", 2, ("n1", "n2"))
    assert job.name == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("UNLIMITED", None),
        ("INVALID", None),
        (None, None),
        ("30", 30),
        ("10:00", 10),
        ("10:01", 11),
        ("01:00:00", 60),
        ("1-00:00:00", 1440),
        ("7-12", 7 * 1440 + 720),
        ("00:00:30", 1),
    ],
)
def test_durations_are_minutes_rounded_up(text: str | None, expected: int | None) -> None:
    assert records.minutes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(null)", ()),
        ("gpu:h100:4(S:0-1)", (Gres("gpu", "h100", 4),)),
        ("gpu:8", (Gres("gpu", None, 8),)),
        ("gpu", (Gres("gpu", None, 1),)),
        (
            "gpu:a100:2(S:0,1),shard:20(S:0-1),nic:4",
            (Gres("gpu", "a100", 2), Gres("shard", None, 20), Gres("nic", None, 4)),
        ),
        ("gpu:a100_1g.5gb:7", (Gres("gpu", "a100_1g.5gb", 7),)),
        ("bandwidth:lustre:4K", (Gres("bandwidth", "lustre", 4096),)),
    ],
)
def test_gres_as_nodes_print_it(text: str, expected: tuple[Gres, ...]) -> None:
    assert records.parse_gres(text) == expected
