"""Stand-in for torchvision.io: the names that SGLang and transformers import."""

import enum
from typing import Any, NoReturn


class ImageReadMode(enum.Enum):
    """The colour modes of torchvision's image readers."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def decode_image(*args: Any, **kwargs: Any) -> NoReturn:
    """Never called for a text model."""
    raise NotImplementedError("torchvision.io is a stand-in of cp_shared_kv_cpu and decodes no image")


decode_jpeg = decode_image
