"""Datasets: what is read, and how a sample is augmented. Nothing here knows of loaders, models or Hydra.

A dataset is a class with `__len__` and `__getitem__`. The keyword arguments of its constructor are the keys
of its yaml in conf/data/, and `train` (True: the training split, augmented; False: the test split).
To add one:

    # data/flowers.py                                   # conf/data/flowers.yaml: use it by data=flowers
    class Flowers:                                      _target_: data.flowers.Flowers
        def __init__(self, train, root): ...            root: null

- `__getitem__(index)` returns {"image": uint8 tensor (H, W, C), "label": int64 tensor ()}. Normalising and
  the change to (C, H, W) are done once a batch, on the device, by `data.transform.Normalize`; what a training batch
  is augmented with as a whole, by `data.augment.Augment`.
- `sample_spec()` says so: {"image": ((H, W, C), torch.uint8), "label": ((), torch.int64)}.
- `arrays()` and `augment_batch(batch, random)`, where a class has them, give loader=resident its samples as arrays
  in memory and augment whole batches of them on the device: see `data.array_dataset`, which has both.
- `classes` are the names of the labels; `mean` and `std` are each channel's, of pixel values scaled to 0..1.
- `__getitem__` draws from torch's default generator, which the loader seeds anew for each sample.
- What the user can put right is a `data.errors.DataError` that says how.
- Tables of file names and labels are arrays: workers share an array, but end up copying a list.

Images that fit in memory need only a subclass of `data.array_dataset.ArrayDataset`, as in data/cifar.py.
"""
