"""A callback that saves a grid of test images with their predicted classes after each evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import default_collate

from loaders import move
from training.look import new_figure, png
from training.run import Run
from training.trainer import evaluating


class Pictures:
    """Writes pictures/epoch-01.png and so on into the run's folder: the first test images; wrong classes are red.

    rows, columns: the size of the grid. Needs task=classification, and uint8 images with 1 or 3 channels.
    """

    def __init__(self, rows: int = 3, columns: int = 8) -> None:
        self.rows = rows
        self.columns = columns

    def on_evaluation(self, run: Run, scores: dict[str, float]) -> None:
        if not run.is_main:
            return
        trainer = run.trainer
        test = run.data.test
        count = min(self.rows * self.columns, len(test))
        collate = run.data.collate or default_collate
        batch = run.data.task.to_dict(collate([test[index] for index in range(count)]))
        images = batch[trainer.task.inputs[0]]
        network = trainer.ema_model or trainer.model
        with torch.no_grad(), trainer.autocast, evaluating(network):  # the evaluation is over: it is in training mode
            on_device = move(batch, lambda tensor: tensor.to(trainer.device))
            inputs, labels = trainer.inputs_and_labels(run.data.transform(on_device))
            predicted = network(*inputs).argmax(1)
        folder = run.folder / "pictures"
        folder.mkdir(exist_ok=True)
        grid = self.grid(images, labels.flatten().tolist(), predicted.tolist(), test.classes)
        file = folder / f"epoch-{trainer.progress.epoch:02d}.png"
        file.write_bytes(grid)

    def grid(self, images: Tensor, labels: list[int], predicted: list[int], classes: list[str]) -> bytes:
        figure = new_figure("", 1.2 * self.columns, 1.4 * self.rows)
        for index, image in enumerate(images):
            is_right = predicted[index] == labels[index]
            axes = figure.add_subplot(self.rows, self.columns, index + 1)
            axes.imshow(image.numpy(), cmap="gray")
            axes.set_title(classes[predicted[index]], fontsize=7, color="black" if is_right else "#d62728")
            axes.set_axis_off()
        return png(figure)
