"""Colours: a slide's own, by its ICC profile, to those that every screen and most models mean."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from inference.errors import UnreadableSlide


class ToSrgb:
    """Converts RGB of a scanner's profile to sRGB (relative colorimetric, so that white stays white).

    Safe to use from several threads.

    Raises:
        UnreadableSlide: the profile is damaged, or not of RGB.
    """

    def __init__(self, profile: bytes, name: str) -> None:
        try:
            self._transform = ImageCms.buildTransform(
                ImageCms.ImageCmsProfile(io.BytesIO(profile)),
                ImageCms.createProfile("sRGB"),
                "RGB",
                "RGB",
                renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            )
        except (ImageCms.PyCMSError, OSError, ValueError) as error:
            raise UnreadableSlide(
                f"{name}: its ICC profile cannot be used ({error}): run without --icc, or mend the profile"
            ) from None

    def __call__(self, rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Pixels (H, W, 3) in sRGB."""
        image = Image.fromarray(rgb)
        ImageCms.applyTransform(image, self._transform, inPlace=True)
        return np.asarray(image)
