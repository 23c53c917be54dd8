"""The cohort's report: a run of its own, over whatever slides have results by then."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import dagster as dg

from inference.engine.report import write_cohort_report
from inference.outputs.report import STATUSES
from pipelines.failures import Around, told_plainly
from pipelines.model_files import PipelineModel
from pipelines.resources import SlideInference


def cohort_report(
    models: Sequence[PipelineModel], *, prefix: Sequence[str], around: Around = nullcontext
) -> dg.AssetsDefinition:
    """One HTML file over all slides: pictures, counts, failed tiles, and why a slide has no result."""
    last = [dg.AssetKey([*prefix, m.name, "heatmap" if m.spec.prediction_names else "slide_features"]) for m in models]

    @dg.asset(
        key=[*prefix, "cohort_report"],
        group_name="cohort",
        deps=[dg.AssetDep(key, partition_mapping=dg.AllPartitionMapping()) for key in last],
        description="One HTML file over all slides: pictures, counts, failed tiles, reasons.",
        kinds={"html"},
    )
    def _cohort_report(inference: SlideInference) -> dg.MaterializeResult[None]:
        with around(), told_plainly():
            path = inference.report_path()
            slides = write_cohort_report(path, "Cohort report", inference.chain, inference.slides().values())
        counts = Counter(slide.status for slide in slides)
        found: dict[str, dg.MetadataValue] = {
            "report": dg.MetadataValue.path(path),
            "slides": dg.MetadataValue.int(len(slides)),
        }
        for status in STATUSES:
            found[status.replace(" ", "_")] = dg.MetadataValue.int(counts[status])
        bad = [dg.TableRecord({"slide": s.key, "reason": s.reason or ""}) for s in slides if s.status == "failed"]
        if bad:
            found["failed_slides"] = dg.MetadataValue.table(bad[:100])
        return dg.MaterializeResult(metadata=found)

    return _cohort_report
