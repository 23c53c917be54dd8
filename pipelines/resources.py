"""What a run holds: the store, the source of slides, and the models, loaded when first needed."""

import os
from pathlib import Path
from typing import cast

import dagster as dg
from pydantic import PrivateAttr

from inference.engine.chain import Chain
from inference.engine.inventory import read_inventory, write_inventory
from inference.engine.run import find_slides
from inference.engine.settings import ReaderMode, Settings
from inference.errors import ConfigError
from inference.slides.discovery import Inventory, SlideRef, split_sources
from inference.slides.grid import EdgePolicy
from inference.slides.resolution import parse_mpp
from inference.slides.roi import check_rois
from inference.store.store import Store
from pipelines.model_files import pipeline_models


class SlideInference(dg.ConfigurableResource["SlideInference"]):
    """Store, slides and models of a run. One process loads each model once, however many slides it takes.

    Attributes:
        store: folder of results; `SLIDE_STORE`, else `out/store`.
        source: slide, folder, glob, cohort file or URL; `SLIDE_SOURCE`. Several are separated as in `PATH`.
        mpp: level-0 µm/px for slides that state none; `SLIDE_MPP`.
        max_pen: share of a tile that may be ink of a pen; 1 for any.
        tissue_model: segmentation model that finds the tissue, path or name; empty for by colours.
        stride_px: pixels between tiles; 0 for what each model's spec says.
        edge: drop, pad or shift: a slide's rest where no whole tile fits.
        roi: region of interest: a file, or a folder with one for each slide.
        icc: convert tiles to sRGB by each slide's ICC profile.
        reader: auto, threads or process: what reads the slides; auto takes processes on network file systems.
        read_timeout_s: for each try of a read, where processes read.
    """

    store: str = ""
    source: str = ""
    mpp: float | None = None
    allow_upsampling: bool = False
    batch_size: int = 64
    device: str = "cpu"
    min_tissue: float = 0.01
    max_pen: float = 1.0
    tissue_model: str = ""
    stride_px: int = 0
    edge: str = "drop"
    roi: str = ""
    icc: bool = False
    reader: str = "auto"
    read_timeout_s: float = 60.0
    max_failed_tiles: int = 16
    max_failed_share: float = 0.05
    lock_wait_s: float = 600.0

    _chain: Chain | None = PrivateAttr(default=None)
    _opened: Store | None = PrivateAttr(default=None)

    @property
    def opened_store(self) -> Store:
        """The store, probed once."""
        if self._opened is None:
            self._opened = Store(self.store or os.environ.get("SLIDE_STORE") or "out/store")
        return self._opened

    @property
    def chain(self) -> Chain:
        """The stages over this run's models."""
        if self._chain is None:
            models = pipeline_models()
            heatmaps = {m.spec.model_name: m.heatmaps for m in models if m.heatmaps}
            self._chain = Chain(self.opened_store, [m.resolve() for m in models], self.settings(), heatmaps=heatmaps)
        return self._chain

    def settings(self) -> Settings:
        """What the engine is told."""
        return Settings(
            mpp=self.mpp if self.mpp is not None else _mpp_of_environment(),
            allow_upsampling=self.allow_upsampling,
            min_tissue=self.min_tissue,
            max_pen=self.max_pen if self.max_pen != 1 else None,
            tissue_model=self.tissue_model or None,
            stride_px=self.stride_px or None,
            edge=cast("EdgePolicy", self.edge),  # which checks it
            roi=Path(self.roi) if self.roi else None,
            icc=self.icc,
            reader=cast("ReaderMode", self.reader),
            read_timeout_s=self.read_timeout_s,
            batch_size=self.batch_size,
            device=self.device,
            max_failed_tiles=self.max_failed_tiles,
            max_failed_share=self.max_failed_share,
            lock_wait_s=self.lock_wait_s,
        )

    def discover(self) -> Inventory:
        """Look at the source and remember which slide each key means.

        Raises:
            ConfigError: no source is configured, it does not exist, or holds no slide.
        """
        source = self.source or os.environ.get("SLIDE_SOURCE") or ""
        if not source:
            raise ConfigError("no source of slides: set SLIDE_SOURCE to a folder, slide, glob, cohort file or URL")
        sources = [source] if Path(source).exists() else split_sources(source, os.pathsep)
        inventory = find_slides(sources)
        check_rois(inventory.slides, Path(self.roi) if self.roi else None)
        write_inventory(self.opened_store, inventory.slides)
        return inventory

    def slides(self) -> dict[str, SlideRef]:
        """Slides by key, as last discovered."""
        return read_inventory(self.opened_store)

    def report_path(self) -> Path:
        """Where the cohort report goes: `SLIDE_REPORT`, else into the store."""
        return Path(os.environ.get("SLIDE_REPORT") or self.opened_store.root / "report.html")

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002 - Dagster passes it
        """Give the models back at the end of the run, however it ended."""
        if self._chain is not None:
            self._chain.close()


def _mpp_of_environment() -> float | None:
    text = os.environ.get("SLIDE_MPP")
    try:
        return parse_mpp(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"SLIDE_MPP is {text!r}: {error.message}") from None
