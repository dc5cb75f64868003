"""Which of its optional methods a dataset offers: `read_batch` with `sample_spec`, `arrays`, and those of a state.

Invariant: `read_batch` and `arrays` count only if they read the samples that `__getitem__` reads.
"""

from typing import Any

import torch

from .arguments import LoaderConfigError, signature_of

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each field of a sample


def offers(dataset: Any, method: str) -> bool:
    """Returns whether the dataset's class has `method`, and no subclass has overridden only `__getitem__`.

    If a subclass overrides `__getitem__` (or `__getitems__`) alone, the inherited method reads other samples, so it
    does not count. Methods that a wrapper forwards by `__getattr__` do not count either, nor those that a property
    gives as None; `read_batch` does not count while `sample_spec()` returns None, as samples have no fixed form.
    Raises LoaderConfigError if it has `read_batch`, but no `sample_spec`.
    """
    owner = owner_of(dataset, method)
    readers = [owner_of(dataset, name) for name in ("__getitem__", "__getitems__")]
    is_own = owner is not None and all(reader is None or issubclass(owner, reader) for reader in readers)
    if not is_own or not callable(getattr(dataset, method, None)):
        return False
    if method != "read_batch":
        return True
    spec = getattr(dataset, "sample_spec", None)
    if not callable(spec):
        name = type(dataset).__name__
        raise LoaderConfigError(f"{name} has read_batch, but no sample_spec(): define both, or rename it")
    return spec() is not None


def owner_of(dataset: Any, method: str) -> type | None:
    """Returns the class that defines `method` for the dataset; None if no class does, or one sets it to None."""
    owner = next((kind for kind in type(dataset).__mro__ if method in vars(kind)), None)
    return None if owner is None or vars(owner)[method] is None else owner


def spec_of(dataset: Any) -> Spec | None:
    """Returns the `sample_spec()` of a dataset that offers `read_batch`, else None.

    Raises LoaderConfigError if it is not {name: (shape, torch dtype)}.
    """
    if not offers(dataset, "read_batch"):
        return None
    spec = dataset.sample_spec()
    try:
        fields = {name: (tuple(map(int, shape)), dtype) for name, (shape, dtype) in spec.items()}
        if all(isinstance(dtype, torch.dtype) for _, dtype in fields.values()):
            return fields
    except (AttributeError, TypeError, ValueError):
        pass
    raise LoaderConfigError(
        f"{type(dataset).__name__}.sample_spec() returned {spec!r}: it should return each field's shape and torch "
        'dtype, such as {"image": ((32, 32, 3), torch.uint8), "label": ((), torch.int64)}'
    )


def has_state(part: Any) -> bool:
    """Returns whether `state_dict` can be called without arguments, and there is a `load_state_dict` to call."""
    try:
        signature_of(part.state_dict).bind()
        return callable(part.load_state_dict)
    except (AttributeError, TypeError, ValueError):
        return False
