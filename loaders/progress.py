"""Which epoch comes next, how much of the present one was delivered, and both as a state to resume from."""

from __future__ import annotations

from typing import Any

from loaders.order import Order

VERSION = 1


class Progress:
    """A loader's place in its order; counts global samples, so that another world size can take it up."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.epoch, self.batch = 0, 0
        self._next: tuple[int, int] | None = (0, 0)
        self._running = False

    def begin(self) -> tuple[int, int]:
        """Starts an epoch and returns it with the number of its first batch to load."""
        self.epoch, self.batch = self._next or (self.epoch + 1, 0)
        self._next, self._running = None, True
        return self.epoch, self.batch

    def delivered(self, number: int | None = None) -> None:
        """Counts the batch (by default the next one) that the consumer has received; after the last one the place is
        (epoch + 1, 0)."""
        self.batch = (self.batch if number is None else number) + 1
        if self.batch >= len(self._order):
            self.finish()

    def finish(self) -> None:
        """Ends the running epoch, if that was not noticed by its last batch: it was empty, or of unknown length."""
        if self._running:
            self.epoch, self.batch = self.epoch + 1, 0
            self._next, self._running = self._next or (self.epoch, 0), False

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next `begin` starts; of the epoch of a loaded state it keeps the position."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"set_epoch({epoch!r}): an epoch is an integer from 0")
        if self._next is None or self._next[0] != epoch:
            self._next = (epoch, 0)

    def state_dict(self) -> dict[str, int]:
        epoch, batch = (self.epoch, self.batch) if self._running else (self._next or (self.epoch, self.batch))
        return {
            "version": VERSION,
            "epoch": epoch,
            "samples": self._order.samples_before(batch),
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `begin` starts. Raises ValueError for a state of another version, seed or data."""
        for key, ours in {"version": VERSION, **self._identity()}.items():
            if state.get(key) != ours:
                raise ValueError(
                    f"this loader's state has {key}={state.get(key)!r}, but the loader has {key}={ours!r}: "
                    f"resume with the {key} of the state, or start afresh"
                )
        self._next, self._running = (state["epoch"], state["samples"] // self._order.global_batch_size), False

    def _identity(self) -> dict[str, int]:
        order = self._order
        return {
            "seed": order.seed,
            "dataset_length": order.length,
            "global_batch_size": order.global_batch_size,
        }
