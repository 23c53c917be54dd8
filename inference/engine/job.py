"""One slide on its way through the stages: what it is, what is done already, and how a result is committed."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from inference.engine.recipes import differing_inputs
from inference.engine.settings import Settings, Stage
from inference.engine.tissue_model import TissueModel
from inference.errors import (
    Broken,
    ConfigError,
    DamagedResult,
    MissingResult,
    Overloaded,
    SlideChanged,
    SourceUnavailable,
    StoreError,
    UnreadableSlide,
    WithdrawnResult,
)
from inference.models.spec import ModelSpec
from inference.slides._cache import Pin
from inference.slides._mounts import on_network
from inference.slides.discovery import SlideRef
from inference.slides.grid import TileGrid
from inference.slides.identity import FileStamp, SlideIdentity, same_content, slide_identity, stamp, unchanged
from inference.slides.objects import fetch, refreshed
from inference.slides.opening import open_slide
from inference.slides.overview import Overview
from inference.slides.process_reader import ProcessReader
from inference.slides.readahead import STALLED_AFTER_S
from inference.slides.reader import SlideReader
from inference.slides.resolution import ReadPlan, SlideResolution, plan_reading, recall_mpp, resolve_mpp
from inference.slides.roi import Roi, find_roi, load_roi, roi_sha256
from inference.slides.sampling import make_grid
from inference.store.files import disk_errors
from inference.store.manifest import Counts, Manifest, damage
from inference.store.store import Address, Store

log = logging.getLogger(__name__)

_OTHER_MPP = 0.1  # relative difference from which a --mpp that is not used is worth a line


class Progress(Protocol):
    """Told how far a stage of a slide is; called from one thread, at most once per tile."""

    def __call__(self, key: str, stage: Stage, done: int, total: int, /) -> None: ...


@dataclass(frozen=True)
class Draft:
    """What a stage found out about the result it wrote into its work folder."""

    status: Literal["ok", "ok with failures", "empty"] = "ok"
    reason: str | None = None
    counts: Counts = field(default_factory=Counts)
    summary: dict[str, JsonValue] = field(default_factory=dict)
    execution: dict[str, JsonValue] = field(default_factory=dict)
    timings: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class StageResult:
    """One finished result of a slide.

    Attributes:
        model: the model it belongs to; None where models share it.
        reused: it was in the store already, for this recipe and this content.
    """

    stage: Stage
    model: str | None
    folder: Path
    manifest: Manifest
    reused: bool


class SlideJob:
    """A slide opened for a run. A context manager; used from one thread (its reader may be read from several)."""

    def __init__(
        self,
        ref: SlideRef,
        store: Store,
        settings: Settings,
        progress: Progress,
        tissue_model: TissueModel | None = None,
    ) -> None:
        self.tissue_model = tissue_model
        self.ref, self.store, self.settings, self.progress = refreshed(ref), store, settings, progress
        self._reader: SlideReader | None = None
        self._pin: Pin | None = None
        self._stamp = stamp(self.ref)
        self._replaced = False
        self._damaged: set[str] = set()
        self._verified = set[Path]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close the slide; what failed because its files changed meanwhile becomes `SlideChanged`."""
        with self._pin or nullcontext():
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._reader is not None:
            self._reader.close()
        if isinstance(error, Exception) and not isinstance(error, SlideChanged | Overloaded | Broken):
            try:
                now = stamp(self.ref)
            except UnreadableSlide:
                if not all(os.access(file, os.F_OK) for file in self.ref.files):
                    return  # deleted, as far as anyone can tell: to be said as it is
                now = ()
            self._refuse_changed(now)

    @property
    def reader(self) -> SlideReader:
        """The opened slide, fetched first if it lies in an object store.

        Raises:
            UnreadableSlide, ReadStalled: it does not open.
            SourceUnavailable, StoreFull: it cannot be fetched.
        """
        if self._reader is None:
            self._pin = self._pin or fetch(self.ref)
            self._reader = self._opened()
        return self._reader

    def _opened(self) -> SlideReader:
        of, settings = (self.ref.path, self.ref.name, self.ref.files), self.settings
        if settings.reader == "process" or (settings.reader == "auto" and on_network(self.ref.path)):
            return ProcessReader(*of, timeout_s=settings.read_timeout_s, processes=settings.readers)
        return open_slide(*of)

    @property
    def stalled_after_s(self) -> float:
        """Seconds without a single read after which the slide is given up; processes have deadlines of their own."""
        return self.reader.patience_s if isinstance(self.reader, ProcessReader) else STALLED_AFTER_S

    @cached_property
    def identity(self) -> SlideIdentity:
        """Content of the slide's files, as they are in this run.

        Raises:
            SlideChanged: they are no longer what this run began with.
        """
        identity = slide_identity(self.ref, self.reader.quickhash)
        self._refuse_changed(identity.files)
        return identity

    @cached_property
    def resolution(self) -> SlideResolution:
        """Level-0 µm/px and its source.

        Raises:
            UnknownResolution: there is none.
        """
        reader, given = self.reader, self.settings.mpp
        found = resolve_mpp(
            self.ref.name,
            reader.mpp,
            reader.objective_power,
            cohort_mpp=self.ref.mpp,
            fallback_mpp=given,
        )
        if given is not None and found.source != "--mpp" and abs(max(found.mpp) / given - 1) > _OTHER_MPP:
            said = "the slide states" if found.source == "slide" else "the cohort file says"
            log.warning("%s: --mpp %g is not used, since %s %g µm/px", self.ref.name, given, said, max(found.mpp))
        return found

    def plan(self, spec: ModelSpec) -> ReadPlan:
        """Which pixels the model gets.

        Raises:
            ResolutionTooCoarse: the slide has too few.
        """
        return plan_reading(
            self.ref.name,
            self.reader.level_sizes,
            self.resolution.mpp,
            spec.tile_spec.resolution,
            kernel=spec.tile_spec.kernel,
            allow_upsampling=self.settings.allow_upsampling,
        )

    def grid(self, spec: ModelSpec) -> TileGrid:
        """The model's tile grid on this slide."""
        size, stride = self.reader.level_sizes[0], self.settings.stride_px or spec.tile_spec.stride
        grid = make_grid(size, self.resolution.mpp, self.plan(spec), spec.tile_spec.size, stride)
        return replace(grid, edge=self.settings.edge)

    @cached_property
    def _roi(self) -> tuple[Path, str] | None:
        """File of the slide's region of interest and its sha256 at first sight."""
        path = find_roi(self.ref, self.settings.roi)
        if path is None:
            return None
        with self._naming_slide():
            return path, roi_sha256(path)

    def roi_on(self, overview: Overview) -> tuple[Roi, NDArray[np.bool_]] | None:
        """The slide's region of interest and what it covers of an overview; None where all of the slide is run.

        Raises:
            ConfigError: it cannot be used for this slide.
            SlideChanged: its file changed since this run began.
        """
        if self._roi is None:
            return None
        path, sha256 = self._roi
        with self._naming_slide():
            roi = load_roi(path)
            if roi.sha256 != sha256:
                raise SlideChanged("its ROI file changed while the slide was processed: run again")
            return roi, roi.plane(self.reader.level_sizes[0], overview.missing.shape, overview.scale)

    @contextmanager
    def _naming_slide(self) -> Iterator[None]:
        """Put the slide's name before errors of its ROI file."""
        try:
            yield
        except (ConfigError, SlideChanged, SourceUnavailable) as error:
            raise type(error)(f"{self.ref.name}: {error.message}", **error.fields) from None

    @property
    def inputs(self) -> dict[str, JsonValue]:
        """What was said of the slide from outside, and decides together with its content."""
        roi: dict[str, JsonValue] = {"roi_sha256": self._roi[1]} if self._roi else {}
        return {
            "mpp": list(self.resolution.mpp),
            "mpp_source": self.resolution.source,
            "allow_upsampling": self.settings.allow_upsampling,
            **roi,
        }

    def finished(self, address: Address) -> Manifest | None:
        """The result at an address, if it is whole and was made from this very slide with these inputs."""
        try:
            manifest = self.store.read(address)
            if manifest is None:
                return None
            recorded = _recorded_identity(manifest)
            self._recall_resolution(manifest, recorded)
            if manifest.inputs != self.inputs:
                self._say_replaced(manifest)
                return None
            self._check_whole(address, manifest)
        except DamagedResult as error:
            if address.folder not in self._damaged:  # asked for again under the lock, and by later stages
                self._damaged.add(address.folder)
                log.warning("%s: computed again, since %s", self.ref.key, error.message.partition(";")[0])
            return None
        if self._unfetched and same_content(recorded, self.ref, None):
            return manifest
        return manifest if same_content(recorded, self.ref, self.reader.quickhash) else None

    def _say_replaced(self, manifest: Manifest) -> None:
        """One line for a slide whose results were made with other inputs: a store keeps one result of a recipe."""
        if not self._replaced:
            self._replaced = True
            log.warning(
                "%s: its results of another %s are replaced; give another --out to keep both",
                self.ref.name,
                differing_inputs(manifest.inputs, self.inputs),
            )  # fmt: skip

    @property
    def _unfetched(self) -> bool:
        """Whether it lies in an object store, and nothing has needed its pixels yet."""
        return bool(self.ref.remote) and self._reader is None

    def _recall_resolution(self, manifest: Manifest, recorded: SlideIdentity) -> None:
        """Spare the download of a slide whose results are done.

        If the objects are those that a result was made from, opening the slide would yield the µm/px recorded there.
        """
        if self._unfetched and "resolution" not in self.__dict__ and unchanged(recorded, self._stamp):
            found = recall_mpp(manifest.inputs, cohort_mpp=self.ref.mpp, fallback_mpp=self.settings.mpp)
            if found is not None:
                self.__dict__["resolution"] = found  # where cached_property keeps it

    def _check_whole(self, address: Address, manifest: Manifest) -> None:
        """Refuse a result with a file missing or cut; its bytes are compared where it is used, see `require`."""
        folder = self.store.path(address)
        for record in manifest.files:
            path = folder / record.name
            if not path.is_file() or path.stat().st_size != record.size:
                raise DamagedResult(f"{path} is missing or has not its recorded size")

    def require(self, address: Address, needed: str) -> Path:
        """Folder of a finished earlier result.

        Its bytes are compared with what was written, once in a run: a flipped bit must not enter the next stage.

        Raises:
            MissingResult: it is not there for this recipe and content.
            WithdrawnResult: it was there and damaged; it counts as absent from now on.
            SlideChanged: it was there, but the slide's files have changed since this run began.
        """
        manifest = self.finished(address)
        if manifest is None:
            self._refuse_changed(stamp(self.ref))
            raise MissingResult(
                f"{self.ref.name}: {needed} needs {address.stage}/{address.name}, which is not in the store for this "
                "slide and these settings: run that stage first, or all of them"
            )
        folder = self.store.path(address)
        if folder not in self._verified:
            if problem := damage(folder, manifest):
                self.store.withdraw(address, manifest, self.settings.lock_wait_s)
                raise WithdrawnResult(
                    f"{self.ref.name}: {address.stage}/{address.name} is damaged ({problem}) and no longer counts as "
                    "done: run all stages again, and check the disk"
                )
            self._verified.add(folder)
        return folder

    def ensure(
        self, stage: Stage, address: Address, compute: Callable[[Path], Draft], *, model: str | None = None
    ) -> StageResult:
        """The result at an address: as it is if it is finished, else computed and committed.

        Raises:
            PartitionBusy: another process is computing it.
            SlideChanged: the slide's files changed meanwhile; nothing is committed.
        """
        folder = self.store.path(address)
        if manifest := self.finished(address):
            return StageResult(stage, model, folder, manifest, reused=True)
        with self.store.lock(address, self.settings.lock_wait_s):
            if manifest := self.finished(address):  # by whoever held the lock
                return StageResult(stage, model, folder, manifest, reused=True)
            started, clock = time.time(), time.monotonic()
            with self.store.work(address) as work:
                with disk_errors(work):
                    draft = compute(work)
                self._refuse_changed(stamp(self.ref))
                manifest = self.store.publish(
                    address,
                    work,
                    Manifest(
                        stage=address.stage,
                        name=address.name,
                        slide_key=self.ref.key,
                        recipe=address.recipe,
                        recipe_digest=address.digest,
                        execution=draft.execution,
                        identity=self.identity.to_json(hidden=self.ref.hidden or not _utf8(self.identity)),
                        inputs=self.inputs,
                        status=draft.status,
                        reason=draft.reason,
                        counts=draft.counts,
                        summary=draft.summary,
                        run={
                            "host": socket.gethostname(),
                            "pid": os.getpid(),
                            "started": round(started, 3),
                            "seconds": round(time.monotonic() - clock, 3),
                            "timings": draft.timings,
                        },
                    ),
                )
        self._verified.add(folder)
        return StageResult(stage, model, folder, manifest, reused=False)

    def _refuse_changed(self, now: tuple[FileStamp, ...]) -> None:
        if now != self._stamp:
            raise SlideChanged(
                f"{self.ref.name}: the file changed while it was being processed (still being copied?): nothing was "
                "kept; run again when it is complete"
            ) from None


def _utf8(identity: SlideIdentity) -> bool:
    """Whether JSON can hold the names of the files; where not, they are known by their position."""
    return all(file.name.encode("utf-8", "ignore").decode() == file.name for file in identity.files)


def _recorded_identity(manifest: Manifest) -> SlideIdentity:
    try:
        return SlideIdentity.from_json(manifest.identity)
    except StoreError as error:
        raise DamagedResult(error.message) from error
