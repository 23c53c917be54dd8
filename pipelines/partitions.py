"""Slides as Dagster partitions: one dynamic key per slide, run in contiguous batches."""

from collections.abc import Collection, Iterator, Sequence

import dagster as dg

DEFAULT_SET = "slide_inference_slides"


def contiguous_chunks(keys: Sequence[str], wanted: Collection[str], size: int) -> Iterator[list[str]]:
    """Split the wanted keys into runs of neighbours in `keys`' order, none longer than `size`.

    Dagster names a batch by its first and last key, so a batch must not span a key that is not wanted.
    """
    wanted = set(wanted)
    chunk: list[str] = []
    for key in keys:
        if key in wanted:
            chunk.append(key)
        if chunk and (key not in wanted or len(chunk) == size):
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def range_tags(chunk: Sequence[str]) -> dict[str, str]:
    """Run tags that select a contiguous batch."""
    if len(chunk) == 1:
        return {"dagster/partition": chunk[0]}
    return {"dagster/asset_partition_range_start": chunk[0], "dagster/asset_partition_range_end": chunk[-1]}


def slides_partitions(name: str = DEFAULT_SET) -> dg.DynamicPartitionsDefinition:
    """The set of slides; discovery adds to it, nothing removes from it."""
    return dg.DynamicPartitionsDefinition(name=name)
