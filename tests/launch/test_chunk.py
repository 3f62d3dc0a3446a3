from hypothesis import given
from hypothesis import strategies as st

from air_hpc.launch.chunk import ArrayLimits, chunk

LIMITS = st.builds(
    ArrayLimits,
    max_array_size=st.integers(1, 30),
    max_array_tasks=st.none() | st.integers(1, 30),
    max_queued=st.none() | st.integers(1, 30),
)


@given(shapes=st.lists(st.sampled_from("abc"), max_size=100), limits=LIMITS)
def test_chunks_partition_the_sweep_under_all_limits(
    shapes: list[str], limits: ArrayLimits
) -> None:
    chunks = chunk(shapes, limits)
    assert sorted(task for c in chunks for task in c.tasks) == list(range(len(shapes)))
    for c in chunks:
        assert {shapes[task] for task in c.tasks} == {c.shape}
        assert list(c.tasks) == sorted(c.tasks)
        # Based at 0: the largest index is one less than the number of tasks.
        assert 1 <= len(c.tasks) <= limits.max_array_size
        assert limits.max_array_tasks is None or len(c.tasks) <= limits.max_array_tasks
        assert limits.max_queued is None or len(c.tasks) <= limits.max_queued


@given(shapes=st.lists(st.sampled_from("abc"), max_size=100), limits=LIMITS)
def test_no_array_more_than_needed(shapes: list[str], limits: ArrayLimits) -> None:
    chunks = chunk(shapes, limits)
    for shape in set(shapes):
        number = sum(c.shape == shape for c in chunks)
        assert number == -(-shapes.count(shape) // limits.tasks_per_chunk)


def test_the_order_of_the_sweep_is_kept() -> None:
    chunks = chunk(["b", "a", "b", "a", "b"], ArrayLimits(max_array_size=2))
    assert [c.tasks for c in chunks] == [(0, 2), (4,), (1, 3)]
