"""The log files of a job's processes, which no other job on this machine may write meanwhile."""

import contextlib
import fcntl
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from trireme.errors import BadRequest, writing

log = logging.getLogger("trireme.launch")


@contextlib.contextmanager
def claimed(paths: Iterable[Path]) -> Iterator[None]:
    """Keep other launchers from these files while the block runs; what they contain stays. A file
    system without locks gets a warning instead.

    Raises BadRequest: another launcher has one of them, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for path in paths:
            with writing(f"launch: cannot write {path}"):
                file = stack.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadRequest(
                    f"launch: expected {path} to be this job's alone, found another job that is"
                    " running and writes it; give each job another --log_dir"
                ) from error
            except OSError as error:
                log.warning("another job that writes %s goes unnoticed: %s", path, error.strerror)
        yield
