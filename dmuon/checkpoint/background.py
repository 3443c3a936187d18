"""Work beside the main thread that a process waits for before it ends, but not for ever.

The work itself is a daemon thread: it may be stuck in a collective whose other ranks hang, which
nothing can interrupt. The interpreter waits for a second thread, which knows when to give up.
"""

import math
import sys
import threading
import warnings
from collections.abc import Callable

AFTER_ERROR_S = 60.0
"""How long a process whose main thread has ended with an error is kept from ending."""
_MARGIN_S = 5.0
"""By which collectives of the work, bounded by the same timeout, may end later than it.

Python cannot end well while a thread of it comes back from such a call.
"""
_POLL_S = 0.2


def run_beside(work: Callable[[], None], name: str, timeout_s: float) -> None:
    """Start ``work`` beside the main thread, or do it here where no thread can be started.

    Args:
        work: raises nothing.
        name: of the thread, and of what is lost when the process cannot wait any longer.
        timeout_s: from the end of the main thread; after an exception that nobody caught there,
            `AFTER_ERROR_S` if that is less. A child of ``multiprocessing`` catches its own, so
            nothing here tells that it has failed.
    """
    worker = threading.Thread(target=work, name=name, daemon=True)
    args = (worker, timeout_s)
    keeper = threading.Thread(target=_keep_alive, args=args, name=f"end of {name}")
    try:
        worker.start()
        keeper.start()
    except RuntimeError:  # no more threads, though the other ranks count on this one
        if worker.ident is None:
            work()
        else:
            worker.join()


def _keep_alive(worker: threading.Thread, timeout_s: float) -> None:
    """Return when the interpreter may end: the thread is gone, or there is no more time."""
    while threading.main_thread().is_alive():
        worker.join(_POLL_S)
        if not worker.is_alive():
            return
    has_failed = getattr(sys, "last_value", None) is not None  # set for what nobody caught
    limit_s = min(timeout_s + _MARGIN_S, AFTER_ERROR_S if has_failed else math.inf)
    worker.join(limit_s)
    if worker.is_alive():
        warnings.warn(
            f"{worker.name} was not finished within {limit_s:g} s of the end of the program, so it "
            "was given up; another rank may hang",
            stacklevel=1,
        )
