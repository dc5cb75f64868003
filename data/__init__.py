"""Datasets: how samples are read and augmented. Nothing here imports loaders, models or Hydra.

A dataset is a class with `__len__` and `__getitem__`. Its constructor takes `train` (True: the training split,
augmented; False: the test split) and the keys of its yaml file in conf/data/. To add one:

    # data/flowers.py                                   # conf/data/flowers.yaml: use it with data=flowers
    class Flowers:                                      _target_: data.flowers.Flowers
        def __init__(self, train, root): ...            root: null

- `__getitem__(index)` returns (image, label), or {"image": image, "label": label}: a uint8 tensor or array (H, W, C),
  and a number. A float image (C, H, W) is used as it is. An image has to be called "image"; other fields may have any
  name: task.inputs and task.label choose them. `__getitem__` may draw from torch's, numpy's or Python's generators,
  which the loader seeds for each sample.
- `classes` are the names of the labels. `task=regression` needs none.
- `mean` and `std` are optional: one number per channel, for pixels scaled to 0..1.
- `sample_spec()` is needed with `read_batch`, and returns the shapes and dtypes of a sample:
  {"image": ((H, W, C), torch.uint8), "label": ((), torch.int64)}.
- `labels`, an array of all of them, is optional: task.class_weights=balanced counts it.
- `without_augmentation()` is optional, for data.val_fraction: the training samples as a test set's.
- `read_batch(indices, out, random)` is optional: it writes a whole batch into memory that the loader provides.
- `arrays()` and `augment_batch(batch, random)` are optional, for loader=resident: they return all samples as arrays,
  and augment whole batches of them on the device. `data.array_dataset` has both.
- `made_seconds` is optional: what making its files took, at their first use; no part of a run's start-up.
- An error that the user can fix is a `data.errors.DataError` that says how.
- File names and labels belong in arrays, not lists: forked workers share an array, but end up copying a list.

Whole batches are processed on the device: `data.transform.Normalize` normalises them and puts the channels first,
and `data.augment.Augment` augments training batches.

Images that fit in memory need only a subclass of `data.array_dataset.ArrayDataset`, as in data/cifar.py.
"""
