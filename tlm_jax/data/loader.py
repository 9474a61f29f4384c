"""The loader: batches of windows whose whole state is one integer, and the fixed batches of validation.

The training order (`TrainOrder`) is an endless stream of windows. Batches are consecutive runs of it, so "how many
windows have been consumed" says where a run stands, whatever the batch size, the number of hosts or worker processes.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags

from tlm_jax.data.mixture import AnyStore
from tlm_jax.data.order import TrainOrder
from tlm_jax.data.windows import cut
from tlm_jax.data.workers import exit_with_parent, signals_held_back
from tlm_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Batches read before they are asked for: enough to hide a slow read, few enough to be small beside a step's memory.
_READ_AHEAD = 4


class _ReadAhead:
    """Takes batches from an iterator in a thread, a few before they are asked for."""

    def __init__(self, batches: grain.DatasetIterator, in_shared_memory: bool) -> None:
        self._batches = batches
        self._in_shared_memory = in_shared_memory
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(_READ_AHEAD)
        self._closing = threading.Event()
        # The thread, and so the worker processes that it starts, inherit which signals are blocked.
        with signals_held_back(signal.SIGINT, signal.SIGTERM):
            self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                batch = next(self._batches)
                if self._in_shared_memory:  # which would live, and at the end leak, with the batch
                    batch = {key: np.array(values) for key, values in batch.items()}
            except Exception as error:
                self._queue.put(error)
                return
            self._queue.put(batch)

    def next(self) -> Batch:
        item = self._queue.get()
        if isinstance(item, Exception):
            self._queue.put(item)  # for whoever asks again
            raise item
        return item

    def close(self) -> None:
        self._closing.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(0.01)
        self._batches.close()


class TrainLoader:
    """An endless iterator of training batches, and a context manager; made by `train_loader`.

    Attributes:
      next_index: windows consumed over all hosts; a loader given it as `start_index` goes on exactly from here.
      order: which windows it reads; its `identity` belongs to a saved index.
    """

    def __init__(self, read_ahead: _ReadAhead, order: TrainOrder, global_batch_size: int, start_index: int) -> None:
        self.order = order
        self.next_index = start_index
        self._global_batch_size = global_batch_size
        self._read_ahead: _ReadAhead | None = read_ahead

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        if self._read_ahead is None:
            raise ValueError("the loader is closed")
        batch = self._read_ahead.next()
        self.next_index += self._global_batch_size
        return batch

    def close(self) -> None:
        """Stops the reading and its processes; a closed loader keeps its `next_index`."""
        if self._read_ahead is not None:
            self._read_ahead.close()
            self._read_ahead = None

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_worker(worker_index: int, worker_count: int) -> None:
    exit_with_parent()


def train_loader(
    store: AnyStore,
    *,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    num_workers: int = 0,
    host_index: int = 0,
    host_count: int = 1,
    start_index: int = 0,
) -> TrainLoader:
    """Returns this host's endless training batches.

    Row r of host h is row r * host_count + h of the global batch. A batch is a window's dictionary (see `Windows`)
    with a leading axis B = global_batch_size / host_count: inputs, targets, mask, segment_ids, positions [B, T],
    bytes and window [B]. Batches are the same for any `num_workers`; they are prepared ahead of their use.

    Args:
      store: where the split "train" is read from; a mixture's stores in turns.
      sequence_length: T.
      global_batch_size: windows per step over all hosts.
      seed: order of the windows, any integer.
      num_workers: processes that cut windows; 0: threads of this process.
      host_index, host_count: which share of every global batch is this host's.
      start_index: `next_index` of the loader that this one continues.

    Raises:
      UserError: an empty split, too many windows, or a batch that the hosts cannot share equally.
    """
    host_batch_size = _host_batch_size(global_batch_size, host_count, "global_batch_size")
    if start_index < 0:
        raise ValueError(f"start_index {start_index} is negative")
    order = TrainOrder(store, sequence_length, seed)
    share = order.stream[start_index + host_index :: host_count].batch(host_batch_size, drop_remainder=True)
    batches = share.map(order.windows.batch).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if num_workers:
        if not flags.FLAGS.is_parsed():  # grain reads its own absl flags, which only absl.app.run parses
            flags.FLAGS.mark_as_parsed()
        workers = grain.multiprocessing.MultiprocessingOptions(num_workers, per_worker_buffer_size=2)
        batches = batches.mp_prefetch(workers, worker_init_fn=_start_worker)
    read_ahead = _ReadAhead(iter(batches), in_shared_memory=num_workers > 0)
    return TrainLoader(read_ahead, order, global_batch_size, start_index)


def validation_batches(
    store: AnyStore,
    *,
    sequence_length: int,
    batch_size: int,
    num_windows: int = 0,
    host_index: int = 0,
    host_count: int = 1,
) -> Iterator[Batch]:
    """Returns this host's batches over windows of the split "validation", in order, each window once.

    Every host yields ceil(windows / batch_size) batches of batch_size / host_count rows, as `train_loader`'s; the
    last global batch is filled with windows in which nothing counts (mask False, bytes 0, window -1).

    Args:
      store: where the split is read from.
      sequence_length: T.
      batch_size: windows per batch over all hosts.
      num_windows: how many windows, evenly spaced over the split, so that each source of text has its share; 0, or
        more than there are: all.
      host_index, host_count: which share of every batch is this host's.

    Raises:
      UserError: an empty split, or a batch that the hosts cannot share equally.
    """
    host_batch_size = _host_batch_size(batch_size, host_count, "batch_size")
    windows = cut(store, "validation", sequence_length)
    count = min(num_windows or len(windows), len(windows))

    def batches() -> Iterator[Batch]:
        for first in range(0, count, batch_size):
            picks = [first + row * host_count + host_index for row in range(host_batch_size)]
            yield windows.batch([pick * len(windows) // count if pick < count else -1 for pick in picks])

    return batches()


def _host_batch_size(batch_size: int, host_count: int, name: str) -> int:
    if batch_size < 1 or batch_size % host_count:
        raise UserError(f"{name} {batch_size} is not a positive multiple of the number of hosts, {host_count}")
    return batch_size // host_count
