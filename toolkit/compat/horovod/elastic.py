"""Elastic state: commits that a run comes back to, in memory and, across restarts of all ranks, in a folder.

Horovod keeps the processes that remain when one fails. torchrun ends and restarts all of them, so what a run comes back to must
be on a disk: `commit` writes to the folder that TOOLKIT_HOROVOD_STATE names, `run` reads it, and removes it when the function
has returned.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import random
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from toolkit.compat.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from toolkit.compat.horovod.submission import barrier
from toolkit.errors import CheckpointError, first_line
from toolkit.io import make_folder

STATE_VARIABLE = "TOOLKIT_HOROVOD_STATE"
_FILE = "horovod-state.pt"


class State:
    """What a run comes back to. Override `save`, `restore` and `sync`."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these functions after the number of ranks may have changed, for instance to set the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Prepare for another number of ranks."""

    def commit(self) -> None:
        """Save the state, so that a run that fails comes back to it; call it on all ranks."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: torchrun restarts all ranks when hosts change, and tells nobody before."""

    def save(self) -> None:
        """Keep a copy of the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over the state of rank 0."""
        raise NotImplementedError


class ObjectState(State):
    """Python values, as attributes, that rank 0 gives to the others.

    Args:
        values: Names and first values.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = list(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.save()

    def contents(self) -> dict[str, Any]:
        """Return a copy of what is saved, which `load_contents` takes."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def load_contents(self, contents: dict[str, Any]) -> None:
        """Set the values to a copy of what was saved."""
        for name, value in contents.items():
            setattr(self, name, copy.deepcopy(value))

    def commit(self) -> None:
        """Save the state in memory and, on rank 0, in the folder of TOOLKIT_HOROVOD_STATE.

        Raises:
            CheckpointError: HOROVOD_STATE, if the folder cannot be written.
        """
        super().commit()
        if (path := _file()) is not None and runtime.rank() == 0:
            _write(path, self._saved)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = self.contents()

    def restore(self) -> None:
        """Go back to the copy in memory."""
        self.load_contents(self._saved)

    def sync(self) -> None:
        """Take over the values of rank 0, and keep a copy of them."""
        self.load_contents(broadcast_object({name: getattr(self, name) for name in self._names}, root_rank=0))
        self.save()


class TorchState(ObjectState):
    """Models, optimizers, learning rate schedules and samplers, and Python values beside them.

    Args:
        model: A model; others may be given by other names.
        optimizer: An optimizer; others may be given by other names.
        values: Further objects. What has a `state_dict` is kept by it; other values must pickle.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer} | values
        self._stateful = [name for name, value in given.items() if _is_stateful(value)]
        super().__init__(**given)

    def contents(self) -> dict[str, Any]:
        """Return a copy of what is saved, which `load_contents` takes."""
        return {
            name: copy.deepcopy(value.state_dict() if name in self._stateful else value)
            for name, value in ((name, getattr(self, name)) for name in self._names)
        }

    def load_contents(self, contents: dict[str, Any]) -> None:
        """Set models, optimizers and values to a copy of what was saved."""
        for name, value in contents.items():
            if name in self._stateful:
                getattr(self, name).load_state_dict(copy.deepcopy(value))
            else:
                setattr(self, name, copy.deepcopy(value))

    def reset(self) -> None:
        """Share out the samplers' rows among the ranks that there are now."""
        for name in self._stateful:
            if isinstance(sampler := getattr(self, name), ElasticSampler):
                sampler.reset()

    def sync(self) -> None:
        """Take over the state of rank 0, and keep a copy of it."""
        for name in self._stateful:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), root_rank=0))
        plain = {name: getattr(self, name) for name in self._names if name not in self._stateful}
        for name, value in broadcast_object(plain, root_rank=0).items():
            setattr(self, name, value)
        self.save()


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a state, so that it goes on from the last commit.

    The state is read from the folder of TOOLKIT_HOROVOD_STATE if a run that ended early has left one there, and taken over from
    rank 0 by the others. The file is removed when the function has returned.

    An operation that fails because a rank has gone ends this process, and torchrun restarts all of them: `--max-restarts`.
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        resumed = _resume(state)
        skip_sync = False
        while True:
            if not skip_sync:
                state.sync()
            if resumed:
                state.on_reset()
            try:
                result = function(state, *args, **kwargs)
            except HostsUpdatedInterrupt as update:
                resumed, skip_sync = True, update.skip_sync
                continue
            except HorovodInternalError as error:
                # What all ranks can mend by going back, they would only meet again: none of it is a passing fault.
                error.add_note(f"The run can go on from its last commit where {STATE_VARIABLE} names a folder.")
                raise
            _finish(state)
            return result

    return elastic


def _file() -> Path | None:
    folder = os.environ.get(STATE_VARIABLE)
    return Path(folder) / _FILE if folder else None


def _resume(state: State) -> bool:
    """Read the last commit on rank 0; return whether there is one."""
    path = _file()
    if path is None or not isinstance(state, ObjectState):
        return False
    contents = error = None
    if runtime.rank() == 0 and path.exists():
        try:
            contents = torch.load(path, map_location="cpu", weights_only=False)
            state.load_contents(contents)
        except Exception as failure:
            error = first_line(failure)
    found, error = broadcast_object((contents is not None, error), root_rank=0)
    if error is not None:
        raise CheckpointError.of(
            code="HOROVOD_STATE",
            key=STATE_VARIABLE,
            message=f"{path} cannot be loaded: {error}",
            fix="Remove it to start anew, or start with the script that wrote it",
        )
    return bool(found)


def _write(path: Path, contents: dict[str, Any]) -> None:
    """Replace the file, so that it is whole whenever the process ends."""
    beside = path.with_suffix(".part")
    try:
        make_folder(path.parent)
        with beside.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError.of(
            code="HOROVOD_STATE",
            key=STATE_VARIABLE,
            message=f"{path} cannot be written: {first_line(error)}",
            fix=f"Set {STATE_VARIABLE} to a folder with space that you may write",
        ) from error


def _finish(state: State) -> None:
    """Remove the commit once the function has returned on all ranks: one that still fails must find it."""
    path = _file()
    if path is not None and isinstance(state, ObjectState):
        barrier()
        if runtime.rank() == 0:
            path.unlink(missing_ok=True)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares out the rows of a data set among the ranks, without those that were processed in this epoch before a restart.

    Args:
        dataset: Data set of constant size.
        shuffle: Whether the rows are drawn in another order in each epoch.
        seed: Seed of that order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with all rows; call it at the end of one, so that a restart inside of one repeats no row."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch of so many rows."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of rows that were processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where a state was taken, with the ranks that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the rows that remain among the ranks that there are now."""
        self.num_replicas, self.rank = runtime.size(), runtime.rank()
        rows = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(rows)
        remaining = rows[self.processed_num :]
        self.num_samples = math.ceil(len(remaining) / self.num_replicas)
        lacking = self.num_samples * self.num_replicas - len(remaining)
        # As many for each rank: the first rows are repeated.
        repeated = [remaining[index % len(remaining)] for index in range(lacking)]
        self._own = (remaining + repeated)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return self.num_samples
