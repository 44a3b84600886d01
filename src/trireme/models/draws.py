"""Random numbers for what models sample while batches are prepared."""

from dataclasses import dataclass, field

import numpy as np

from trireme.data.batch import Batch


@dataclass(eq=False)
class Draws:
    """A generator for each batch. It depends on the seed and on the batch's place in the data:
    epoch, stream and position. So a batch is sampled anew in every epoch and pass, and as before
    in a run that is repeated or resumed. Batches without a position are counted instead.

    Threads: one at a time.
    """

    seed: int = 0
    _num_unplaced: int = field(default=0, init=False)

    def of(self, batch: Batch) -> np.random.Generator:
        place = batch.position
        if not place:
            place, self._num_unplaced = (self._num_unplaced,), self._num_unplaced + 1
        return np.random.default_rng([self.seed, batch.epoch, batch.stream, *place])
