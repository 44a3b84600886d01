"""The process that `trireme place` runs a training script in, until the script trains.

script_program FILE TYPE CORES DEVICE SCRIPT ARGUMENTS...

The first call of Trainer.fit, or of Trainer.evaluate with labels, measures instead, writes FILE and
ends the script as a request to stop would. The process keeps to CORES of the machine's cores.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NOT_TRAINED = 3
"""The exit code if the script ends before it trains."""


def main() -> int:
    file, name, cores, device, script, *arguments = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])  # before torch is loaded

    from trireme.errors import Stopped
    from trireme.place.measurements import Measurements
    from trireme.place.measuring import (
        StageMeasuring,
        num_first_of,
        read_batches,
        rounded,
        seconds_per_byte,
        stages_of,
    )
    from trireme.train.trainer import Trainer

    def measure(trainer: Trainer, dataset: Iterable[Any], *_: Any, **__: Any) -> dict[str, float]:
        batches, read_s = read_batches(trainer, dataset)
        measuring = StageMeasuring(trainer, device)
        num_batches = measuring.run(batches)
        Measurements(
            type=name,
            cores=int(cores),
            device=device,
            script=script,
            examples=sum(batch.num_examples for batch in batches) / len(batches),
            batches=num_batches,
            num_first=num_first_of(stages_of(trainer.model)),
            seconds_per_byte=rounded(seconds_per_byte()),
            stages=measuring.stages(read_s, batches),
        ).write(Path(file))
        raise Stopped("trireme place has measured")

    evaluate: Callable[..., dict[str, float]] = Trainer.evaluate

    def measure_or_evaluate(trainer: Trainer, *rest: Any, **options: Any) -> dict[str, float]:
        if options.get("labels", True) and options.get("model") is None:
            return measure(trainer, *rest, **options)
        return evaluate(trainer, *rest, **options)

    for name_of_method, method in {"fit": measure, "evaluate": measure_or_evaluate}.items():
        setattr(Trainer, name_of_method, method)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Stopped:
        return 0
    return NOT_TRAINED


if __name__ == "__main__":
    sys.exit(main())
