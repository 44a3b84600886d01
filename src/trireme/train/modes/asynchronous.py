"""Mode async: a push is applied when it arrives; its staleness is measured and reported."""

from trireme.train.modes.base import Mode


class Async(Mode):
    """As `Mode`: rows are pulled one batch ahead, pushes are sent behind the training loop."""
