"""ESMM: clicks and conversions together, so that conversions are learnt from all examples, not
from the clicked ones alone.

Source: Ma et al., "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click
Conversion Rate", SIGIR 2018.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated
from trireme.models.layers import mlp
from trireme.models.tasks import ConversionInputs, conversion_metrics, logit_of_both
from trireme.table import Table
from trireme.train.recipe import Recipe


class ESMM(nn.Module):
    """Two towers over the same rows: one for the click, one for the conversion after a click. The
    product of their probabilities is that of a click with a conversion. layers: widths of the
    hidden layers of each tower; conversion_layers: of the second, if it has others; for the other
    arguments see trireme.models.inputs.
    """

    def __init__(
        self,
        rows: Table,
        *,
        layers: Sequence[int] = (256, 128),
        conversion_layers: Sequence[int] | None = None,
        **inputs: Any,
    ) -> None:
        super().__init__()
        others = layers if conversion_layers is None else conversion_layers
        self.inputs = Concatenated(rows, **inputs)
        self.click = mlp([self.inputs.width, *layers, 1])
        self.conversion = mlp([self.inputs.width, *others, 1])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) logits: "ctr", "cvr" (of the conversion, given the click) and "ctcvr" (of both)."""
        x = self.inputs(batch)
        click, conversion = self.click(x).squeeze(1), self.conversion(x).squeeze(1)
        return {"ctr": click, "cvr": conversion, "ctcvr": logit_of_both(click, conversion)}


def esmm_loss(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """The log loss of the clicks plus that of the conversions, over all examples."""
    log_loss = nn.functional.binary_cross_entropy_with_logits
    click, conversion = (tensor_of(batch, name) for name in ("click", "conversion"))
    return log_loss(outputs["ctr"], click) + log_loss(outputs["ctcvr"], conversion)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, those of ConversionInputs
    (trireme.models.tasks), and fc_sizes, the widths of the hidden layers of each tower (default
    256, 128); or ctr_fc_sizes and cvr_fc_sizes.
    """
    hyper = HyperParameters(config)
    layers, inputs = hyper.sizes("fc_sizes", (256, 128)), ConversionInputs.of(hyper)
    model = ESMM(
        inputs.rows,
        layers=hyper.sizes("ctr_fc_sizes", layers),
        conversion_layers=hyper.sizes("cvr_fc_sizes", layers),
        **inputs.arguments,
    )
    return hyper.recipe(
        model, esmm_loss, label=None, schema=inputs.schema, metrics=conversion_metrics()
    )
