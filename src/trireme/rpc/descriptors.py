"""The limit of open files and sockets of this process, raised to what its connections need."""

import resource

from trireme.errors import BadRequest

_OTHERS = 1024
"""Descriptors for all but connections: files of data, logs and checkpoints."""


def allow_descriptors(num: int, purpose: str) -> None:
    """Raise the soft limit so that `num` connections' descriptors and others fit. Raises
    BadRequest: the hard limit is lower; it names `purpose`.
    """
    needed = num + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise BadRequest(
                f"{purpose}: expected a hard limit of {needed} open files or more, found {hard}:"
                " raise it (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
