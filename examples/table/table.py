"""A table: houses in a CSV file, whose price a perceptron predicts.

python -m examples.table.table DIR    # makes DIR/train.csv and DIR/test.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from torch import nn

COLUMNS = ("area", "rooms", "age", "distance")  # the inputs, in order


class Table:
    """Samples {"features": float (4,), "label": float ()}: a row of root/train.csv or root/test.csv, standardised.

    Both files are standardised by the mean and the spread of each column in the training rows.
    """

    def __init__(self, train: bool, root: str, label: str = "price") -> None:
        columns = (*COLUMNS, label)
        training_rows = read(Path(root) / "train.csv", columns)
        rows = training_rows if train else read(Path(root) / "test.csv", columns)
        self.center = training_rows.mean(0)
        self.spread = training_rows.std(0) + 1e-6
        self.rows = (rows - self.center) / self.spread

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"features": self.rows[index, :-1], "label": self.rows[index, -1]}


def read(path: Path, columns: tuple[str, ...]) -> np.ndarray:
    """The columns of a CSV file, float32 (rows, columns)."""
    with path.open(newline="") as file:
        return np.array([[float(row[name]) for name in columns] for row in csv.DictReader(file)], np.float32)


class MLP(nn.Sequential):
    """Takes features (B, 4), returns (B, num_classes): the numbers that the task predicts."""

    def __init__(self, num_classes: int, width: int = 64) -> None:
        super().__init__(
            nn.Linear(len(COLUMNS), width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, num_classes),
        )


def write(folder: Path, count: int = 2000) -> None:
    """Writes train.csv with `count` houses, and test.csv with a quarter of that."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, seed in (("train", count, 0), ("test", count // 4, 1)):
        random = np.random.default_rng(seed)
        area, age, distance = random.uniform((30, 0, 1), (250, 90, 40), (rows, 3)).T
        rooms = np.round(area / random.uniform(18, 35, rows)) + 1
        location = np.exp(-distance / 15)
        price = 3 * area * location + 12 * rooms - 0.5 * age + random.normal(0, 10, rows)
        houses = np.stack([area, rooms, age, distance, price], axis=1)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*COLUMNS, "price"])
            table.writerows(houses.round(2).tolist())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
