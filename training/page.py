"""The common look of all pages: a page is one HTML file that needs no other file, and no network.

Invariant: all values are escaped. Jinja, which torch needs too, is imported only when a page is written.
"""

import base64
from pathlib import Path
from typing import Any

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
