"""The common look of all pictures. Matplotlib is imported only when a picture is drawn."""

import io
from typing import Any

from training.table import shorten

INK = "#222222"


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
