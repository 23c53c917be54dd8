"""The one set of definitions: discovery, the per-slide chain, the cohort's report."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import dagster as dg

from pipelines.defs.chain.assets import slide_chain
from pipelines.defs.cohort.assets import cohort_report
from pipelines.defs.discovery.assets import slide_inventory
from pipelines.defs.discovery.sensors import new_slides_sensor
from pipelines.failures import Around
from pipelines.model_files import pipeline_models
from pipelines.partitions import DEFAULT_SET, slides_partitions
from pipelines.resources import SlideInference

BATCH = 16
"""Slides per run, at most: a batch shares one process and one load of each model."""

INVENTORY_JOB, SLIDES_JOB, REPORT_JOB = "inventory", "slides", "report"


def build_definitions(
    *,
    prefix: Sequence[str] = (),
    partition_set: str = DEFAULT_SET,
    batch: int = BATCH,
    loggers: Mapping[str, dg.LoggerDefinition] | None = None,
    around: Around = nullcontext,
) -> dg.Definitions:
    """Everything, under an asset key prefix and a partition set of the caller's choosing.

    Args:
        around: entered around every step, inside what Dagster puts there itself.
    """
    models, partitions = pipeline_models(), slides_partitions(partition_set)
    inventory = slide_inventory(partitions, prefix=list(prefix), around=around)
    chain = slide_chain(models, partitions, prefix=prefix, batch=batch, around=around)
    report = cohort_report(models, prefix=prefix, around=around)
    per_slide = dg.AssetSelection.assets(chain)
    return dg.Definitions(
        assets=[inventory, chain, report],
        jobs=[
            dg.define_asset_job(INVENTORY_JOB, dg.AssetSelection.assets(inventory)),
            dg.define_asset_job(SLIDES_JOB, per_slide),
            dg.define_asset_job(REPORT_JOB, dg.AssetSelection.assets(report)),
        ],
        sensors=[new_slides_sensor(partitions, per_slide, batch=batch)],
        resources={"inference": SlideInference()},
        loggers=loggers,
        executor=dg.in_process_executor,
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Loaded by Dagster."""
    return build_definitions()
