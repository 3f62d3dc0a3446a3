import re

import pytest

from air_hpc.launch import identity


def test_a_run_id_is_readable_and_a_plain_file_name() -> None:
    (name,) = identity.run_ids(["llama_8b"], now=1796033759.0)
    assert re.fullmatch(r"llama_8b-\d{6}-\d{6}-[0-9a-f]{6}", name)
    assert re.fullmatch(r"sweep-\d{6}-\d{6}-[0-9a-f]{6}", identity.sweep_id(now=1796033759.0))


def test_the_runs_of_a_sweep_sort_as_they_were_written() -> None:
    ids = identity.run_ids(["tiny"] * 12, now=1796033759.0)
    assert list(ids) == sorted(ids)
    assert len(set(ids)) == 12


def test_a_thousand_ids_of_one_second_are_mostly_distinct() -> None:
    assert len({identity.submission_key() for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b/c", "a-b-c"), ("../..", "run"), ("ü", "run"), ("-x-", "x"), ("y" * 99, "y" * 40)],
)
def test_labels_are_safe_in_paths(text: str, expected: str) -> None:
    assert identity.label(text) == expected


def test_the_key_stands_in_the_jobs_name() -> None:
    assert identity.job_name("my job", "0123456789", ".2") == "my job-0123456789.2"
