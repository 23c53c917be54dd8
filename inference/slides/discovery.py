"""Which slides there are: sources in, slides with stable keys out.

A source is a slide file, a folder, a glob or a cohort file. A folder or glob yields what looks like a slide; whatever
is left out for a reason worth knowing is listed as skipped. A cohort row promises one slide or more and is never
dropped: a file that is missing or of an unknown kind stays in the inventory and fails, visibly, when it is opened.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from inference.errors import ConfigError, SourceUnavailable
from inference.slides._companions import COMPANION_FORMATS, companions
from inference.slides._files import EVERYTHING, GlobPattern, Skipped, is_inside, kind_of, list_files
from inference.slides.cohort import CohortRow, is_cohort_file, read_cohort
from inference.slides.dicom import DicomInstance, group_series, is_dicom, read_instance
from inference.slides.keys import hidden_key, slide_key

__all__ = ["IMAGE_SUFFIXES", "SLIDE_SUFFIXES", "Inventory", "Skipped", "SlideRef", "discover"]

SLIDE_SUFFIXES = frozenset(
    {".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm"}
)
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})  # taken only where named
