"""The common look of the tables, pictures and pages that extras/ and examples/ show.

A page is one HTML file that needs no other file, and no network. Invariant: all values in it are escaped.
Matplotlib, and Jinja, which torch needs too, are imported only when a picture or a page is made.
"""

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tabulate import tabulate

from training.files import write_whole

INK = "#222222"


def table(columns: Iterable[list[str]]) -> list[str]:
    """The lines of a table. The first cell of a column is its heading. Columns of numbers are aligned right."""
    columns = [[shorten(cell, 32) for cell in column] for column in columns]
    sides = ["right" if all(cell[:1] in "-±.0123456789" for cell in column[1:]) else "left" for column in columns]
    text = tabulate(list(zip(*columns, strict=True)), tablefmt="plain", colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def shorten(text: str, longest: int) -> str:
    """Returns `text`; if it is longer than `longest` characters, its middle is replaced by …."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def new_figure(title: str, width: float, height: float) -> Any:
    """Returns an empty figure of `width` x `height` inches, without changing matplotlib's global state."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=130, layout="constrained")
    options = {"x": 0.01, "ha": "left", "fontsize": 13, "weight": "bold", "color": INK, "parse_math": False}
    figure.suptitle(shorten(title, int(8.5 * width)), **options)
    return figure


def png(figure: Any) -> bytes:
    """The content of a PNG file of the figure."""
    figure.savefig(image := io.BytesIO(), format="png")
    return image.getvalue()


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
