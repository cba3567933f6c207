"""A process that imports torch while this one starts, and then makes traces."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from toolkit.forks import end_process, end_with

Question = tuple[str, tuple[Any, ...]]  # the name of a method of `LocalTracing`, and its arguments


class ProcessEndedError(Exception):
    """Raised if the process has ended, such as for want of memory."""


class TraceProcess:
    """A process that imports torch at once, and then answers questions of `toolkit.memory.search.tracing`, on all cores.

    It is forked here: the less is imported by then, the earlier it begins. It ends with this process, if not before.

    Args:
        serve: Called there when torch is imported: `toolkit.memory.search.tracing.answer_questions`, or what imports it first.

    Attributes:
        processor_seconds: Processor time of the answers so far, without imports.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._connection, other = Pipe()
        parent = os.getpid()
        self.processor_seconds = 0.0
        self._asked: deque[list[str]] = deque()
        self._answers: dict[str, tuple[Any, BaseException | None]] = {}
        self._child = os.fork()
        if self._child == 0:
            self._connection.close()
            _serve(other, parent, serve)
        other.close()
        self._end = weakref.finalize(self, _end, self._connection, self._child, parent)

    def ask(self, plain: bool, questions: Mapping[str, Question]) -> None:
        """Ask at once what was not asked before, by keys; answers come later.

        Args:
            plain: As of `tracing.is_plain`, alike for all that this process is asked.
            questions: Questions by what stands for them.
        """
        new = {key: question for key, question in questions.items() if not self._is_asked(key)}
        if new:
            with suppress(OSError):  # `answer` finds that it has ended
                self._connection.send((plain, list(new.values())))
            self._asked.append(list(new))

    def answer(self, plain: bool, key: str, question: Question) -> Any:
        """Wait for the answer to a question, asked before or now, and return it or raise what it raised.

        Raises:
            ProcessEndedError: There is none.
        """
        self.ask(plain, {key: question})
        while key not in self._answers:
            try:
                answers, spent = self._connection.recv()
            except (EOFError, OSError):
                raise ProcessEndedError from None
            self.processor_seconds += spent
            self._answers |= zip(self._asked.popleft(), map(pickle.loads, answers), strict=True)
        value, error = self._answers[key]
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the process; questions then find that it has ended."""
        self._end()

    def _is_asked(self, key: str) -> bool:
        return key in self._answers or any(key in keys for keys in self._asked)


def _end(connection: Connection, child: int, parent: int) -> None:
    connection.close()
    if os.getpid() == parent:  # and no fork of it
        end_process(child)


def _serve(connection: Connection, parent: int, serve: Callable[[Connection], None]) -> NoReturn:
    """Import torch, and answer questions until the other end is closed, which ends this process."""
    try:
        end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is lost
        warnings.simplefilter("ignore", FutureWarning)
        gc.disable()  # until all is imported
        from toolkit.launch.packages import quiet_torchao

        quiet_torchao()
        import torch  # noqa: F401

        with suppress(EOFError, OSError):
            serve(connection)
    finally:
        os._exit(0)
