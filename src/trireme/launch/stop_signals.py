"""The signals of the launcher, as something to wait for beside the output of its processes."""

import contextlib
import os
import signal
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def wakeup_fd() -> Iterator[int]:
    """A descriptor that gets a byte, the signal's number, for each signal of the launcher. A signal
    that the launcher's parent ignores (nohup) stays ignored.
    """
    handled = [*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH]
    before = {number: signal.getsignal(number) for number in handled}
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        yield read_fd
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)
