"""The sensor that notices new slides and asks for their results in contiguous batches."""

import dagster as dg

from inference.errors import InferenceError
from inference.slides.keys import key_secret
from pipelines.failures import unforeseen
from pipelines.partitions import contiguous_chunks, range_tags
from pipelines.resources import SlideInference


def new_slides_sensor(
    partitions: dg.DynamicPartitionsDefinition, selection: dg.AssetSelection, *, batch: int
) -> dg.SensorDefinition:
    """Registers slides that appeared at the source and requests every stage for them."""
    assert partitions.name is not None, "a named set"
    name = partitions.name

    @dg.sensor(
        name="new_slides",
        target=selection,
        minimum_interval_seconds=60,
        description="Looks at the source once a minute; new slides become partitions and are run in batches.",
    )
    def _new_slides(context: dg.SensorEvaluationContext, inference: SlideInference) -> dg.SensorResult | dg.SkipReason:
        try:
            inventory = inference.discover()
        except InferenceError as error:
            # An unreachable or empty source is never taken for an empty cohort.
            return dg.SkipReason(error.message)
        except Exception as error:
            if key_secret() is None:
                raise
            return dg.SkipReason(unforeseen(error))
        known = context.instance.get_dynamic_partitions(name)
        new = [ref.key for ref in inventory.slides if ref.key not in set(known)]
        if not new:
            return dg.SkipReason(f"{len(inventory.slides)} slides, none of them new")
        requests = [
            dg.RunRequest(run_key=f"{chunk[0]}...{chunk[-1]}", tags=range_tags(chunk))
            for chunk in contiguous_chunks([*known, *new], new, batch)
        ]
        return dg.SensorResult(run_requests=requests, dynamic_partitions_requests=[partitions.build_add_request(new)])

    return _new_slides
