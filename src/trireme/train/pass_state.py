"""Which pass of its script a worker is in, and how many steps it has made."""

from collections.abc import Sequence
from dataclasses import replace

from trireme.train.predecessor import PredecessorProgress
from trireme.train.push_stream import PushStream
from trireme.worker import passes
from trireme.worker.client import WorkerClient
from trireme.worker.passes import EnteredPass


class PassState:
    """The pass and the step count of a worker."""

    def __init__(self, client: WorkerClient, stream: PushStream) -> None:
        self._client, self._stream = client, stream
        # Its `note` is what counting continued from. None: between passes.
        self.entered: EnteredPass | None = None
        self.num_steps = 0  # of this worker; of the job where all workers make each together
        # A loop that begins no pass would repeat what a predecessor has pushed.
        self.is_repeating = False
        self._is_new = client.script.is_successor

    def begin_script(self) -> None:
        """Compare the start of the script with where the servers stand."""
        self.is_repeating = self._is_new and self._stream.sequence > 0

    def begin(
        self, counts: Sequence[int] = (), *, together: bool = False, staged: bool = False
    ) -> tuple[EnteredPass, PredecessorProgress]:
        """Enter the next pass, and set stream and step count to where it began and to what a
        predecessor has pushed since. counts: what the mode counts besides; `entered.note[2:]` are a
        predecessor's. together, staged: see passes.begin_pass.
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

    def enter_shared(self, entered: EnteredPass) -> None:
        """Come to a pass of shared streams. A late worker counts on from the others' steps."""
        self.entered = entered
        if self._is_new:
            self.num_steps = max(self.num_steps, entered.num_steps)
            self._is_new = entered.is_over
