"""A process that imports torch while this one starts, and then makes traces."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from toolkit.forks import end_process, end_with, num_cores

Question = tuple[str, tuple[Any, ...]]  # the name of a method of `LocalTracing`, and its arguments

_MOST_WORKERS = 2
_MOST_AHEAD = 4


class ProcessEndedError(Exception):
    """Raised if the process has ended, such as for want of memory."""


class TraceProcess:
    """A process that imports torch at once, and then answers questions of `toolkit.memory.search.tracing`, with a fork of itself.

    It is forked here: the less is imported by then, the earlier it begins. It ends with this process, if not before. Each of the
    two has one question at a time, so that neither waits for a reader of what it writes while this process writes to it.

    Args:
        serve: Called there when torch is imported, with a connection for itself and one for each fork:
            `toolkit.memory.search.tracing.answer_questions`, or what imports it first.

    Attributes:
        processor_seconds: Processor time of the answers that were read, without imports.
    """

    def __init__(self, serve: Callable[[Sequence[Connection]], None]) -> None:
        pairs = [Pipe() for _ in range(min(_MOST_WORKERS, num_cores()))]
        self._connections = [own for own, _ in pairs]
        parent = os.getpid()
        self.processor_seconds = 0.0
        self._ahead: dict[str, tuple[bool, Question]] = {}  # asked, and not begun
        self._begun: dict[Connection, str] = {}
        self._answers: dict[str, tuple[bytes, float]] = {}
        self._child = os.fork()
        if self._child == 0:
            for own in self._connections:
                own.close()
            _serve([other for _, other in pairs], parent, serve)
        for _, other in pairs:
            other.close()
        self._end = weakref.finalize(self, _end, self._connections, self._child, parent)

    def ask(self, plain: bool, questions: Mapping[str, Question]) -> None:
        """Ask ahead what was not asked before, by keys, the likeliest first; what was asked ahead earlier comes after it, or never.

        Args:
            plain: As of `tracing.is_plain`, alike for all that this process is asked.
            questions: Questions by what stands for them.
        """
        new = {key: (plain, question) for key, question in questions.items() if not self._is_known(key)}
        self._ahead = dict(itertools.islice((new | self._ahead).items(), max(len(new), _MOST_AHEAD)))
        with suppress(OSError, EOFError):  # `answer` finds that it has ended
            self._read(seconds=0.0)
            self._begin()

    def answer(
        self, plain: bool, key: str, question: Question, *, meanwhile: Callable[[], bool] = lambda: False
    ) -> Any:
        """Wait for the answer to a question, asked before or now, and return it or raise what it raised.

        Args:
            plain: As of `ask`.
            key: What stands for the question.
            question: The question.
            meanwhile: Called while there is none; returns whether there may be more to do.

        Raises:
            ProcessEndedError: There is none.
        """
        try:
            self._read(seconds=0.0)
            if not self._is_known(key):
                self._ahead = {key: (plain, question)} | self._ahead
            while key not in self._answers:
                self._begin(key)
                self._read(seconds=0.0 if meanwhile() else None)
        except (EOFError, OSError):
            raise ProcessEndedError from None
        content, spent = self._answers[key]
        self.processor_seconds += spent
        self._answers[key] = content, 0.0
        value, error = pickle.loads(content)
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the process; questions then find that it has ended."""
        self._end()

    def _is_known(self, key: str) -> bool:
        return key in self._answers or key in self._begun.values()

    def _read(self, *, seconds: float | None) -> None:
        """Read the answers that are there, or wait for one."""
        for connection in wait(list(self._begun), seconds) if self._begun else ():
            assert isinstance(connection, Connection)
            self._answers[self._begun.pop(connection)] = connection.recv()

    def _begin(self, key: str | None = None) -> None:
        """Give questions to those who have none; one is left free for what is asked next, unless `key` is waited for."""
        for connection in self._connections:
            is_last = len(self._begun) == len(self._connections) - 1
            if not self._ahead or (is_last and key is None):
                return
            if connection not in self._begun:
                new = next(iter(self._ahead))
                plain, question = self._ahead.pop(new)
                self._begun[connection] = new
                connection.send((plain, max(1, num_cores() - len(self._begun) + 1), question))


def _end(connections: Sequence[Connection], child: int, parent: int) -> None:
    for connection in connections:
        connection.close()
    if os.getpid() == parent:  # and no fork of it
        end_process(child)


def _serve(connections: Sequence[Connection], parent: int, serve: Callable[[Sequence[Connection]], None]) -> NoReturn:
    """Import torch, and answer questions until the other ends are closed, which ends this process."""
    try:
        end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is lost
        warnings.simplefilter("ignore", FutureWarning)
        gc.disable()  # until all is imported
        from toolkit.launch.quiet import quiet_packages

        quiet_packages()
        import torch

        # A fork of a process whose OpenMP has begun threads waits for ever in its first product; traces need none.
        torch.set_num_threads(1)
        with suppress(EOFError, OSError):
            serve(connections)
    finally:
        os._exit(0)
