"""Datasets: how samples are read and augmented. Nothing here imports loaders, models or Hydra.

A dataset is a class with `__len__` and `__getitem__`. Its constructor takes `train` (True: the training split,
augmented; False: the test split) and the keys of its yaml file in conf/data/. To add one:

    # data/flowers.py                                   # conf/data/flowers.yaml, for data=flowers
    class Flowers:                                      _target_: data.flowers.Flowers
        def __init__(self, train, root): ...            root: null

- `__getitem__(index)` returns (image, label), or {"image": image, "label": label}. The image is a uint8 tensor or
  array (H, W, C), which is normalised later, or a float one (C, H, W), which is not. The label is a number. The field
  with the image must be named "image"; task.inputs and task.label name the others. `__getitem__` may draw from
  torch's, numpy's or Python's generators, which the loader seeds for each sample.
- `prepare(image)` is what predict.py and export.py do to a new image: it takes the pixels of a file, a uint8 array
  (H, W, C) of any size, upright, grey or RGB as the samples are, and returns a sample's image. `__getitem__` should
  call it too, so that both do the same. Without it these scripts refuse new images. They call it without the data: it
  may use attributes that are numbers, texts, or short lists of them, because a checkpoint stores those.
- `classes` are the names of the labels. `task=regression` needs none.
- `mean` and `std` are optional: one number per channel, for pixels scaled to 0..1.
- `labels`, an array (N,) of all labels, is optional: task.class_weights=balanced needs it, to count the classes.
- `without_augmentation()` is optional: it returns the same samples, not augmented, for data.val_fraction.
- `read_batch(indices, out, random)` is optional: it writes a batch into memory that the loader provides. It needs
  `sample_spec()`, which returns a sample's shapes and dtypes:
  {"image": ((H, W, C), torch.uint8), "label": ((), torch.int64)}. With data.collate, samples are read one by one.
- `will_read(indices)` is optional, with `read_batch`: a worker process calls it with the batch that follows the one it
  is about to read, if that is known, so that requests for it can begin.
- `arrays()` and `augment_batch(batch, random)` are optional, for loader=resident: the first returns all samples as
  arrays, the second augments a batch of them on the device. `data.array_dataset` has both.
- `made_seconds` is optional: how long the constructor took to make its files. Reports do not count it as start-up.
- A stream has `__iter__` instead of `__len__` and `__getitem__`, and is a torch.utils.data.IterableDataset. The loader
  reads it as `loader.streams` streams: each yields its share of the samples, by the id and num_workers of torch's
  get_worker_info(), and may have `state_dict()` and `load_state_dict(state)`, to resume without reading again.
- For an error that the user can fix, raise `data.errors.DataError` with a sentence that says how.
- File names and labels belong in arrays, not lists: forked workers share an array, but end up copying a list.

Whole batches are processed on the device: `data.transform.Normalize` normalises them and puts the channels first,
and `data.augment.Augment` augments training batches.

Images that fit in memory need only a subclass of `data.array_dataset.ArrayDataset`, as in data/cifar.py.
"""
