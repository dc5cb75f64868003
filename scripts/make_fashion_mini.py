"""Makes data/embedded/ from the full Fashion-MNIST: the first images of each class, in their order.

    python scripts/make_fashion_mini.py --source /usr/share/datasets/fashion-mnist

The same version of liblzma writes the same bytes each time.
"""

import lzma
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import DataError
from data.fashion import CLASSES, EMBEDDED, TEST_FILES, TRAIN_FILES, find_files, read_idx
from scripts.command import parser, run_script

SOURCE = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist has it


def make(source: Path, target: Path, train_per_class: int = 1000, test_per_class: int = 200) -> None:
    """Writes four .xz files into `target`. Raises DataError if `source` is not the full dataset."""
    paths = find_files(source)
    if not paths:
        wanted = ", ".join(TRAIN_FILES + TEST_FILES)
        raise DataError(f"{source} does not have all of {wanted} (or .gz); give another folder with --source")
    target.mkdir(parents=True, exist_ok=True)
    for names, per_class in ((TRAIN_FILES, train_per_class), (TEST_FILES, test_per_class)):
        images, labels = (read_idx(paths[name]) for name in names)
        classes = [np.flatnonzero(labels == label)[:per_class] for label in range(len(CLASSES))]
        chosen = np.sort(np.concatenate(classes))
        for name, array in zip(names, (images[chosen], labels[chosen]), strict=True):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()  # of an IDX file, uint8
            content = lzma.compress(header + array.tobytes(), preset=9 | lzma.PRESET_EXTREME)
            (target / f"{name}.xz").write_bytes(content)
            print(f"{target / name}.xz: an array of shape {array.shape} in {len(content):,} bytes")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--source", type=Path, default=SOURCE, help="folder of the full dataset (%(default)s)")
    options.add_argument("--target", type=Path, default=EMBEDDED, help="folder to write to (%(default)s)")
    given = options.parse_args()
    run_script(lambda: make(given.source, given.target))
