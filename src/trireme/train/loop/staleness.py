"""How stale pushes were when servers applied them."""

from collections import Counter

from trireme.train.optimizer import DistributedOptimizer


def staleness(optimizer: DistributedOptimizer) -> dict[int, int]:
    """See Trainer.staleness."""
    optimizer.flush()
    total: Counter[int] = Counter()
    for server in optimizer.cluster.client.stats():
        total.update({int(steps): count for steps, count in server["staleness"].items()})
    return dict(sorted(total.items()))


def described(histogram: Counter[int]) -> str:
    """Median, 99 % and maximum of a histogram, in words."""
    if not histogram:
        return "staleness: no pushes were applied"
    at = [f"{_quantile(histogram, part)} at {part} %" for part in (50, 99, 100)]
    return f"staleness of {histogram.total()} pushes at servers: {', '.join(at)}"


def _quantile(histogram: Counter[int], percent: int) -> int:
    """The smallest staleness that this percentage of the pushes does not exceed."""
    seen = 0
    for steps in sorted(histogram):
        seen += histogram[steps]
        if 100 * seen >= percent * histogram.total():
            break
    return steps
