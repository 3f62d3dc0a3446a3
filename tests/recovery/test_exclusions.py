from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from air_hpc.recovery.exclusions import active, exclude_list, exclusion, worth_compacting
from air_hpc.rundir.exclusions import Entry, Exclusion, Release

NODES = [f"n{number}" for number in range(6)]


def of(node: str, time: float = 0.0, until: float = 100.0, reason: str = "") -> Exclusion:
    return Exclusion(node, time, until, reason)


def names(entries: list[Entry], now: float = 50.0) -> list[str]:
    return [each.node for each in active(entries, now)]


def test_an_exclusion_is_forgotten_at_its_end() -> None:
    assert names([of("n1")], now=99.9) == ["n1"]
    assert names([of("n1")], now=100.0) == []


def test_a_release_ends_what_stands_before_it_and_nothing_after() -> None:
    assert names([of("n1"), of("n2"), Release("n1", 5)]) == ["n2"]
    assert names([of("n1"), of("n2"), Release(None, 5)]) == []
    assert names([Release("n1", 5), of("n1")]) == ["n1"]


def test_a_release_holds_whatever_the_clock_of_the_node_said() -> None:
    assert names([of("n1", time=7000.0, until=9000.0), Release("n1", 60.0)]) == []


def test_a_second_failure_is_the_newer_evidence_and_never_an_earlier_end() -> None:
    asked, failed = of("n1", until=200.0, reason="by hand"), of("n1", time=9.0, reason="hang")
    (found,) = active([asked, of("n2"), failed], 50.0)[1:]
    assert (found.node, found.reason, found.until) == ("n1", "hang", 200.0)


def test_the_oldest_evidence_gives_way_to_the_cap_and_to_the_run() -> None:
    entries = [of(node) for node in ("n1", "n2", "n3")]
    free = dict.fromkeys(NODES, True)
    assert exclude_list(entries, 50, 2, free, 8) == ("n1", "n2", "n3")
    assert exclude_list(entries, 50, 2, free, 2) == ("n2", "n3")
    assert exclude_list(entries, 50, 5, free, 8) == ("n3",)
    assert exclude_list(entries, 50, 6, free, 8) == ()
    assert exclude_list(entries, 50, 9, free, 8) == ()
    assert exclude_list(entries, 50, 2, free, 0) == ()


def test_a_node_that_takes_no_jobs_is_avoided_at_no_cost() -> None:
    """A dead node is excluded and down: it must not use up the room that it does not take."""
    free = {**dict.fromkeys(NODES, True), "n1": False}
    assert exclude_list([of("n1"), of("n2")], 50, 5, free, 8) == ("n1",)
    assert exclude_list([of("n1"), of("n2")], 50, 4, free, 8) == ("n1", "n2")


def test_nodes_of_other_partitions_are_left_out_and_take_no_room() -> None:
    entries = [of("n1"), of("elsewhere")]
    assert exclude_list(entries, 50, 5, dict.fromkeys(NODES, True), 1) == ("n1",)


def test_where_the_site_does_not_say_only_the_cap_holds() -> None:
    entries = [of(node) for node in NODES]
    assert exclude_list(entries, 50, 100, None, 2) == ("n4", "n5")


@given(
    st.lists(
        st.one_of(
            st.builds(of, st.sampled_from(NODES), st.integers(0, 9), st.integers(0, 100)),
            st.builds(Release, st.sampled_from([None, *NODES]), st.integers(0, 9)),
        ),
        max_size=20,
    ),
    st.integers(1, 7),
    st.dictionaries(st.sampled_from(NODES), st.booleans()),
    st.integers(0, 4),
)
def test_a_run_that_could_start_still_can(
    entries: list[Entry], needed: int, available: dict[str, bool], cap: int
) -> None:
    chosen = exclude_list(entries, 50, needed, available, cap)
    standing = {each.node for each in active(entries, 50)}
    assert set(chosen) <= standing & set(available)
    assert len(chosen) <= cap
    left = sum(usable for node, usable in available.items() if node not in chosen)
    assert left >= min(needed, sum(available.values()))
    assert chosen == exclude_list(entries, 50, needed, available, cap)


def test_an_entry_is_written_on_one_line_with_its_end() -> None:
    found = exclusion("n1", now=100.0, hours=2, reason="a\n b", failure_class="hang", run="tiny-1")
    assert (found.until, found.reason, found.by) == (7300.0, "a b", "agent")


def test_only_a_file_that_grew_and_is_mostly_over_is_worth_compacting() -> None:
    over: tuple[Entry, ...] = tuple(of(f"m{n}", until=10.0) for n in range(300))
    assert worth_compacting(over, 0, 50.0)
    assert worth_compacting((), 300, 50.0)
    assert not worth_compacting(over[:100], 0, 50.0)
    assert not worth_compacting(tuple(of(f"m{n}") for n in range(300)), 0, 50.0)
