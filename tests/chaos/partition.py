"""A network of two hosts (namespaces of this machine) whose connection can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class Namespace:
    """The workers' host, called `name`. The servers' host is this one, at `host`."""

    def __init__(self) -> None:
        number = os.getpid()
        self.name = f"chaos-{number}"
        self._near, self._far = f"cn{number}", f"cf{number}"
        net = f"10.{200 + number % 50}.{number // 50 % 250}"
        self.host, self._there = f"{net}.1", f"{net}.2"

    def make(self) -> None:
        far = ["-n", self.name]
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", self.name)
        _ip("addr", "add", f"{self.host}/24", "dev", self._near)
        _ip("link", "set", self._near, "up")
        _ip(*far, "addr", "add", f"{self._there}/24", "dev", self._far)
        _ip(*far, "link", "set", self._far, "up")
        _ip(*far, "link", "set", "lo", "up")

    def cut(self, is_cut: bool) -> None:
        """Pull the cable, or put it back: at the workers' end."""
        _ip("-n", self.name, "link", "set", self._far, "down" if is_cut else "up")

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def namespace() -> Iterator[Namespace | str]:
    """A second host, or why there is none."""
    made = Namespace()
    try:
        try:
            made.make()
        except FileNotFoundError:
            yield "there is no command ip"
        except subprocess.CalledProcessError as error:
            yield f"network namespaces are for root: {error.stderr.strip()}"
        else:
            yield made
    finally:
        made.remove()
