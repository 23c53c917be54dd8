"""Discovery: which slides there are. It registers partitions; it runs nothing."""

from contextlib import nullcontext

import dagster as dg

from inference.slides.discovery import Inventory
from pipelines.failures import Around, told_plainly
from pipelines.resources import SlideInference


def slide_inventory(
    partitions: dg.DynamicPartitionsDefinition, *, prefix: list[str], around: Around = nullcontext
) -> dg.AssetsDefinition:
    """The asset that looks at the source and registers each slide as a partition."""
    assert partitions.name is not None, "a named set"
    name = partitions.name

    @dg.asset(
        key=[*prefix, "slide_inventory"],
        group_name="slides",
        description="Slides found at the source, in cohort order; each becomes a partition.",
        kinds={"parquet"},
    )
    def _slide_inventory(context: dg.AssetExecutionContext, inference: SlideInference) -> dg.MaterializeResult[None]:
        with around(), told_plainly():
            inventory = inference.discover()
        known = set(context.instance.get_dynamic_partitions(name))
        keys = [ref.key for ref in inventory.slides]
        new = [key for key in keys if key not in known]
        context.instance.add_dynamic_partitions(name, new)
        gone = known.difference(keys)
        for key in sorted(gone)[:20]:
            context.log.warning("%s: registered earlier, no longer at the source", key)
        return dg.MaterializeResult(metadata=_metadata(inventory, len(new), len(gone)))

    return _slide_inventory


def _metadata(inventory: Inventory, new: int, gone: int) -> dict[str, dg.MetadataValue]:
    found: dict[str, dg.MetadataValue] = {
        "slides": dg.MetadataValue.int(len(inventory.slides)),
        "new": dg.MetadataValue.int(new),
        "gone": dg.MetadataValue.int(gone),
        "skipped": dg.MetadataValue.int(len(inventory.skipped)),
    }
    if inventory.skipped:
        # Under a secret no file name may enter the event log.
        hidden = any(ref.hidden for ref in inventory.slides)
        rows = [
            dg.TableRecord({"file": "hidden" if hidden else s.path.name, "code": s.code, "reason": s.reason})
            for s in inventory.skipped[:100]
        ]
        found["skipped_files"] = dg.MetadataValue.table(rows)
    return found
