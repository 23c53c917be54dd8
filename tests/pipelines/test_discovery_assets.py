"""Slides become partitions, once, and the sensor asks for new ones in batches."""

import shutil

import dagster as dg
import pytest

from pipelines.partitions import DEFAULT_SET
from pipelines.resources import SlideInference
from tests.pipelines.conftest import Pipeline, failure_text


def test_discovery_registers_slides_in_order_and_again_changes_nothing(pipeline: Pipeline) -> None:
    first = pipeline.discover()
    assert [key.rsplit("-", 1)[0] for key in first] == ["a-svs", "b-tiff", "c-empty-svs", "d-damaged-svs", "e-svs"]
    assert pipeline.discover() == first


def test_a_source_that_is_not_there_fails_discovery_and_names_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_SOURCE", str(pipeline.source / "nowhere"))
    result = pipeline.run("inventory")
    assert not result.success
    assert "nowhere" in failure_text(result)
    assert pipeline.instance.get_dynamic_partitions(DEFAULT_SET) == []


def test_the_sensor_registers_new_slides_and_requests_contiguous_batches_once(pipeline: Pipeline) -> None:
    sensor = pipeline.definitions.resolve_sensor_def("new_slides")

    def tick() -> dg.SensorResult | dg.SkipReason:
        with dg.build_sensor_context(
            instance=pipeline.instance, resources={"inference": SlideInference()}, definitions=pipeline.definitions
        ) as context:
            found = sensor(context)
            assert isinstance(found, dg.SensorResult | dg.SkipReason)
            return found

    first = tick()
    assert isinstance(first, dg.SensorResult)
    assert first.run_requests is not None
    assert first.dynamic_partitions_requests is not None
    (request,) = first.run_requests
    (added,) = first.dynamic_partitions_requests
    keys = list(added.partition_keys)
    assert request.tags["dagster/asset_partition_range_start"] == keys[0]
    assert request.tags["dagster/asset_partition_range_end"] == keys[-1]
    pipeline.instance.add_dynamic_partitions(DEFAULT_SET, keys)
    assert isinstance(tick(), dg.SkipReason)
    shutil.copy(pipeline.source / "a.svs", pipeline.source / "f.svs")
    second = tick()
    assert isinstance(second, dg.SensorResult)
    assert second.run_requests is not None
    assert [r.tags["dagster/partition"].startswith("f-svs") for r in second.run_requests] == [True]


def test_an_unreachable_source_is_never_taken_for_an_empty_cohort(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.discover()
    monkeypatch.setenv("SLIDE_SOURCE", str(pipeline.source / "unmounted"))
    sensor = pipeline.definitions.resolve_sensor_def("new_slides")
    with dg.build_sensor_context(
        instance=pipeline.instance, resources={"inference": SlideInference()}, definitions=pipeline.definitions
    ) as context:
        found = sensor(context)
    assert isinstance(found, dg.SkipReason)
    assert "unmounted" in (found.skip_message or "")
    assert len(pipeline.instance.get_dynamic_partitions(DEFAULT_SET)) == 5
