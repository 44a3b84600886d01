"""The signals of the launcher, as something to wait for beside the output of its processes."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# timeout(1) sends its signal to its command, then to the command's group; systemd may send SIGHUP
# after SIGTERM; a shell that is hung up passes SIGHUP on, beside the kernel. Each is one wish.
_SAME_S = 1.0


class NewSignals:
    """Which stop signals are no repetition of one less than a second before."""

    def __init__(self) -> None:
        self._same_until = 0.0

    def __call__(self, numbers: bytes) -> list[signal.Signals]:
        new = []
        for number in numbers:
            if number in STOP_SIGNALS and time.monotonic() > self._same_until:
                new.append(signal.Signals(number))
                self._same_until = time.monotonic() + _SAME_S
        return new


@contextlib.contextmanager
def wakeup_fd() -> Iterator[int]:
    """A descriptor that gets a byte, the signal's number, for each signal of the launcher. A signal
    that the launcher's parent ignores (nohup) stays ignored. After a stop signal all of them are:
    it may be repeated when the job has ended, and the launcher only has to say so.
    """
    handled = [*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH]
    before = {number: signal.getsignal(number) for number in handled}
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    came: set[int] = set()
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda received, _: came.add(received))
        yield read_fd
    finally:
        signal.set_wakeup_fd(old_fd)
        is_stopped = not came.isdisjoint(STOP_SIGNALS)
        for number, handler in before.items():
            is_over = is_stopped and number in STOP_SIGNALS
            signal.signal(number, signal.SIG_IGN if is_over else handler)
        os.close(read_fd)
        os.close(write_fd)
