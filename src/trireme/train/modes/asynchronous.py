"""Mode async: a push is applied when it arrives; its staleness is measured and reported."""

from trireme.train.modes.on_servers.mode import OnServers


class Async(OnServers):
    """As `OnServers`."""
