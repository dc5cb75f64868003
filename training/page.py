"""The common look of all pages: a page is one HTML file that needs no other file, and no network.

Invariant: all values are escaped. Jinja, which torch needs too, is imported only when a page is written.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from training.files import write_whole


def write_page(path: Path, template: Path, **values: Any) -> None:
    """Writes the template, which extends page.html, with the values."""
    from jinja2 import Environment, FileSystemLoader

    folders = FileSystemLoader([template.parent, Path(__file__).parent])
    environment = Environment(loader=folders, autoescape=True, trim_blocks=True)
    write_whole(path, environment.get_template(template.name).render(values))


def embedded(picture: bytes, kind: str = "png") -> str:
    """The picture as the address of an image in a page."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def thumbnail(pixels: np.ndarray, side: int) -> str:
    """An image, uint8 (H, W, C), as the address of a picture of at most `side` x `side` pixels: in colour, or grey."""
    picture = Image.fromarray(np.ascontiguousarray(pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., 0]))
    picture.thumbnail((side, side))
    picture.save(file := io.BytesIO(), "PNG")
    return embedded(file.getvalue())
