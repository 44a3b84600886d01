"""Which pass of its script a worker is in, and how many steps it has made."""

from collections.abc import Sequence
from dataclasses import replace

from trireme.train.predecessor import PredecessorProgress
from trireme.train.push_stream import PushStream
from trireme.worker import passes
from trireme.worker.client import WorkerClient
from trireme.worker.passes import EnteredPass


class PassState:
    """The pass and the step count of a worker.

    Attributes:
        entered: the pass, whose `note` is what counting went on from; None between passes.
        num_steps: steps of this worker, or of the job where all workers make each step together.
        is_repeating: a predecessor has made pushes that a loop which begins no pass would repeat.
    """

    def __init__(self, client: WorkerClient, stream: PushStream) -> None:
        self._client, self._stream = client, stream
        self.entered: EnteredPass | None = None
        self.num_steps = 0
        self.is_repeating = False
        self._is_new = client.script.is_successor

    def begin_script(self) -> None:
        """Compare the start of the script with where the servers stand."""
        self.is_repeating = self._is_new and self._stream.sequence > 0

    def begin(
        self, counts: Sequence[int] = (), *, together: bool = False, staged: bool = False
    ) -> tuple[EnteredPass, PredecessorProgress]:
        """Enter the next pass, and set stream and step count to where it began and to what a
        predecessor has pushed since.

        Args:
            counts: what the mode counts besides; `entered.note[2:]` are a predecessor's.
            together, staged: see passes.begin_pass.
        """
        note = (self._stream.sequence, self.num_steps, *counts)
        entered = passes.begin_pass(self._client, note, together=together, staged=staged)
        progress = PredecessorProgress.from_entered(entered, self._stream.sequence)
        if not progress.is_over:
            entered = replace(entered, note=note if entered.note is None else entered.note)
            assert entered.note is not None
            self._stream.sequence = entered.note[0] + progress.num_pushes
            self.num_steps = entered.note[1]
        self.entered, self.is_repeating = entered, False
        return entered, progress

    def enter_shared(self, entered: EnteredPass, num_steps: int) -> None:
        """Come to a pass of shared streams. num_steps: of workers that were there from the
        beginning; a worker that was not counts on from there.
        """
        self.entered = entered
        if self._is_new:
            self.num_steps, self._is_new = max(self.num_steps, num_steps), entered.is_over
