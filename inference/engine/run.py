"""The whole job from Python: one slide, or everything under some paths."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inference.engine.chain import Chain, SlideOutcome
from inference.engine.inventory import write_inventory
from inference.engine.job import Progress
from inference.engine.model import require_usable
from inference.engine.settings import Settings
from inference.engine.tissue_model import require_usable_tissue_model
from inference.errors import ConfigError
from inference.models.registry import resolve_model
from inference.slides.discovery import Inventory, discover, printable
from inference.slides.keys import key_secret
from inference.store.store import Store


def run_slide(
    path: str | Path,
    model: str,
    out: str | Path,
    *,
    mpp: float | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> SlideOutcome:
    """Run one slide through every stage of one model; results lie in the store `out`.

    Args:
        mpp: level-0 µm/px, used if the slide states none; the same as `Settings.mpp`.

    Raises:
        ConfigError: the path names no slide, or more than one; or its key has another slide's results in the store.
        UnknownModel: no such model.
        InferenceError: why the slide failed.
    """
    secret = key_secret()
    slides = discover([path], secret=secret).slides
    if len(slides) != 1:
        named = path if secret is None else "the path"
        raise ConfigError(f"{named} names {len(slides)} slides: run_slide takes one")
    chosen = settings or Settings()
    if mpp is not None:
        chosen = replace(chosen, mpp=mpp)
    checkpoint = resolve_model(model)
    require_usable(checkpoint, chosen)
    require_usable_tissue_model(chosen)
    with Chain(Store(out), [checkpoint], chosen) as chain:
        write_inventory(chain.store, slides, keep=True)
        outcome = chain.run_slide(slides[0], progress=progress)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def find_slides(
    sources: Sequence[str | Path], *, root: str | Path | None = None, secret: str | None = None
) -> Inventory:
    """Everything under the sources, in order; the secret is the environment's unless one is given.

    Raises:
        ConfigError: a source does not exist, or there is no slide at all.
    """
    secret = key_secret() if secret is None else secret
    inventory = discover(sources, root=root, secret=secret)
    if not inventory.slides:
        hidden = secret is not None
        skipped = [("a file" if hidden else printable(s.path.name), s.reason) for s in inventory.skipped[:5]]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        where = "the sources" if hidden else ", ".join(map(str, sources))
        raise ConfigError(f"no slide found under {where}" + (f" ({reasons})" if reasons else ""))
    return inventory
