"""Reads a slide through processes that can be killed, for sources that may hang and decoders that may crash."""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.errors import Broken, InferenceError, ReadStalled, SlideChanged, SourceUnavailable, TileReadError
from inference.slides._reader_process import ProcessLost, ReaderProcess
from inference.slides._reader_wire import RGB, RGBA, Facts, Region, error_from_json, room_for, take
from inference.slides.reader import MAX_REGION_PIXELS, Pixels, require_region
from inference.slides.resolution import REDUCTIONS
