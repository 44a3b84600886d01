"""Which pass of its script a worker is in."""

from dataclasses import replace

from trireme.train.modes.on_servers.push_stream import PushStream
from trireme.train.predecessor import PredecessorProgress
from trireme.worker import passes
from trireme.worker.client import WorkerClient
from trireme.worker.passes import EnteredPass, PassNote


class PassState:
    """The pass of a worker, which a predecessor may have begun."""

    def __init__(self, client: WorkerClient, stream: PushStream) -> None:
        self._client, self._stream = client, stream
        self.entered: EnteredPass | None = None  # None: between passes
        # A loop that begins no pass would repeat what a predecessor has pushed.
        self.is_repeating = False
        self._is_new = client.script.is_successor

    def begin_script(self) -> None:
        """Compare the start of the script with where the servers stand."""
        self.is_repeating = self._is_new and self._stream.sequence > 0

    def begin(
        self, note: PassNote, *, together: bool = False, staged: bool = False
    ) -> tuple[EnteredPass, PredecessorProgress]:
        """Enter the next pass, and set the stream to where it began and to what a predecessor has
        pushed since. together, staged: see passes.begin_pass.
        """
        entered = passes.begin_pass(self._client, note, together=together, staged=staged)
        progress = PredecessorProgress.from_entered(entered, self._stream.sequence)
        if not progress.is_over:
            self._stream.sequence = entered.note.sequence + progress.num_pushes
        self.entered, self.is_repeating = entered, False
        return entered, progress

    def enter_shared(self, num_steps: int) -> EnteredPass:
        """Enter the next pass of shared streams. A late worker counts on from the others' steps."""
        entered = passes.enter(self._client, num_steps)
        if self._is_new:
            num_steps = max(num_steps, entered.num_steps)
            self._is_new = entered.is_over
        self.entered = replace(entered, num_steps=num_steps)
        return self.entered
