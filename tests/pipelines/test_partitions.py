"""Batches of slides are contiguous, complete, and no longer than allowed."""

from hypothesis import given
from hypothesis import strategies as st

from pipelines.partitions import contiguous_chunks, range_tags


@given(st.integers(0, 40), st.sets(st.integers(0, 39)), st.integers(1, 7))
def test_chunks_cover_each_wanted_key_once_in_order_and_span_no_other(n: int, chosen: set[int], size: int) -> None:
    keys = [f"s{i:02d}" for i in range(n)]
    wanted = {f"s{i:02d}" for i in chosen if i < n}
    chunks = list(contiguous_chunks(keys, wanted, size))
    assert [key for chunk in chunks for key in chunk] == [key for key in keys if key in wanted]
    for chunk in chunks:
        assert 1 <= len(chunk) <= size
        first = keys.index(chunk[0])
        assert chunk == keys[first : first + len(chunk)]


def test_a_single_key_is_named_as_a_partition_and_several_as_a_range() -> None:
    assert range_tags(["a"]) == {"dagster/partition": "a"}
    tags = range_tags(["a", "b", "c"])
    assert tags == {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
