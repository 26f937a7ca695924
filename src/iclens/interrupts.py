"""Interrupts (Ctrl-C) where they would be lost or do harm."""

import contextlib
import gc
import signal
from collections.abc import Iterator
from types import FrameType

STOPPED = 128 + signal.SIGINT
"""Exit code of a command that was interrupted."""
AGAIN_SECONDS = 0.05
"""Time after which an interrupt that came where it would be lost comes again."""


_held = 0
_waiting = False


def listen() -> None:
    """Let an interrupt raise `KeyboardInterrupt` where it is heard.

    Python prints and forgets what is raised in finalizers and in callbacks of its garbage
    collector; with jax it spends long enough in these for every tenth interrupt to be lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _waiting
    if _held:
        _waiting = True
        return
    forgetful = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in forgetful or frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Keep an interrupt until the block ends, and from processes and threads begun in it.

    Modules are imported so: an interrupt while an extension module initialises is an `ImportError`
    to its importer, and some packages swallow it.  Where another thread may get the interrupt for
    the main one, it is kept only after `listen`.
    """
    global _held, _waiting
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGALRM})
    _held += 1
    try:
        yield
    finally:
        _held -= 1
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if _waiting and not _held:
            _waiting = False
            raise KeyboardInterrupt
