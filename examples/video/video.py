"""Video: a sample is a folder of frames, of which 3D convolutions get some, at equal distances.

python -m examples.video.video DIR    # makes DIR/train and DIR/val with squares that move to the left or right
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor, nn


class Clips:
    """Samples (frames, label): uint8 (frames, size, size, 3), of the images in root/train/CLASS/VIDEO/ or val/."""

    def __init__(self, train: bool, root: str, frames: int = 8, size: int = 32) -> None:
        self.classes = sorted(folder.name for folder in Path(root, "train").iterdir())
        self.folders = sorted(Path(root, "train" if train else "val").glob("*/*"))
        self.labels = np.array([self.classes.index(folder.parent.name) for folder in self.folders])
        self.frames = frames
        self.size = size

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        files = sorted(self.folders[index].iterdir())
        chosen = np.linspace(0, len(files) - 1, self.frames).round().astype(int)
        images = [Image.open(files[number]).convert("RGB").resize((self.size, self.size)) for number in chosen]
        return np.stack([np.asarray(image) for image in images]), self.labels[index]


class Net3D(nn.Sequential):
    """Takes frames, uint8 (B, frames, H, W, 3), and returns logits.

    Only fields with one image per sample are normalised for it, so it scales frames itself.
    """

    def __init__(self, num_classes: int, width: int = 8) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv3d(inputs, outputs, 3, (1, 2, 2), padding=1), nn.BatchNorm3d(outputs), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4 * width, num_classes))

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames.permute(0, 4, 1, 2, 3) / 127.5 - 1)  # type: ignore[no-untyped-call]  # torch says no types


def write(folder: Path, count: int = 128) -> None:
    """Writes `count` training videos of 12 frames, and a quarter as many in val/."""
    for number in range(count + count // 4):
        video = folder / ("train" if number < count else "val") / ("left", "right")[number % 2] / f"{number:04}"
        video.mkdir(parents=True, exist_ok=True)
        for frame, x in enumerate(range(0, 24, 2) if number % 2 else range(22, -2, -2)):
            image = np.random.default_rng([number, frame]).integers(60, 120, (40, 40, 3), np.uint8)
            image[16:24, x : x + 8] = 220
            Image.fromarray(image).save(video / f"{frame:02}.png")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
