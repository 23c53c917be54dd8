"""The demo model: stain separation and what can be counted on its maps. It has no trained weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RGB_FROM_HED = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78))
"""Optical density of pure haematoxylin, eosin and DAB in red, green and blue.

Source: Ruifrok and Johnston, Anal Quant Cytol Histol 23 (2001) 291-299, as in scikit-image's `rgb_from_hed`.
"""

HEMATOXYLIN_POSITIVE_OD = 0.35
"""Haematoxylin optical density (base 10) above which a pixel counts as nucleus."""

FLOOR = 1e-6
"""Transmission below this is not told apart; the floor that scikit-image's `rgb2hed` uses."""

POOL = 4
"""Cells per side over which maps are pooled: 4 maps x 4 x 4 cells = 64 features."""


class DemoNet(nn.Module):
    """uint8 RGB tiles (B, 3, H, W) -> embedding (B, 64) and prediction (B, 3), both float32.

    Prediction: share of haematoxylin-positive pixels, mean haematoxylin and mean eosin optical density.
    Embedding: over 4 x 4 cells, the mean of the haematoxylin map, the mean of the eosin map, the standard
    deviation of the haematoxylin map and its mean absolute gradient.
    """

    hed_from_rgb: Tensor

    def __init__(self) -> None:
        super().__init__()
        inverse = torch.linalg.inv(torch.tensor(RGB_FROM_HED, dtype=torch.float64))
        self.register_buffer("hed_from_rgb", inverse.to(torch.float32).contiguous())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        hematoxylin, eosin = self.separate(image)
        positive = (hematoxylin > HEMATOXYLIN_POSITIVE_OD).to(torch.float32)
        area = positive.mean(dim=(1, 2))
        gradient = F.pad((hematoxylin[:, :, 1:] - hematoxylin[:, :, :-1]).abs(), (0, 1))
        gradient = gradient + F.pad((hematoxylin[:, 1:] - hematoxylin[:, :-1]).abs(), (0, 0, 0, 1))
        cells = _cells(torch.stack((hematoxylin, eosin, gradient), dim=1))
        means = cells.mean(dim=(3, 5), keepdim=True)
        # About the mean, not E[x^2] - E[x]^2: on an even cell that difference is rounding, and its root is not small.
        spread = (cells[:, 0] - means[:, 0]).square().mean(dim=(2, 4)).sqrt()
        means_h, means_e, means_gradient = means.flatten(2).unbind(dim=1)
        embedding = torch.cat((means_h, means_e, spread.flatten(1), means_gradient), dim=1)
        # Means of the cells' means: one running sum over 50,000 pixels loses its fifth digit to rounding.
        return embedding, torch.stack((area, means_h.mean(dim=1), means_e.mean(dim=1)), dim=1)

    def separate(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Haematoxylin and eosin optical density (base 10), each (B, H, W), never below 0."""
        density = -torch.log10((image.to(torch.float32) / 255.0).clamp_min(FLOOR))
        red, green, blue = density.unbind(dim=1)
        m = self.hed_from_rgb
        maps = (red * m[0, stain] + green * m[1, stain] + blue * m[2, stain] for stain in (0, 1))
        hematoxylin, eosin = (x.clamp_min(0.0) for x in maps)
        return hematoxylin, eosin


def _cells(maps: Tensor) -> Tensor:
    """(B, M, H, W) -> (B, M, POOL, H / POOL, POOL, W / POOL)."""
    batch, count, height, width = maps.shape
    return maps.reshape(batch, count, POOL, height // POOL, POOL, width // POOL)
