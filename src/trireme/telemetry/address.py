"""Addresses of metrics endpoints."""

from trireme.errors import BadRequest


def split_address(text: str, name: str = "metrics") -> tuple[str, int]:
    """Host and port of "host:port", ":port" or "port"; without a host it is loopback. Raises
    BadRequest, which begins with `name`.
    """
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise BadRequest(f"{name}: expected [HOST:]PORT with a port up to 65535, found {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def nth_address(text: str, n: int) -> str:
    """The address of the n-th of several processes if `text` is that of the first: the port plus n;
    port 0 stays 0. Raises BadRequest: there is no such port.
    """
    host, port = split_address(text)
    if port and port + n > 65535:
        raise BadRequest(
            f"metrics: expected {n + 1} ports from {port} on, found {65535 - port + 1}"
        )
    return join_address(host, port + n if port else 0)
