"""Stand-in for torchvision.transforms: the enum that image processors of transformers name in their signatures."""

import enum


class InterpolationMode(enum.Enum):
    """The resize filters of torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
