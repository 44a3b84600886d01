"""ESCM2: ESMM whose conversions, known of clicked examples alone, count as if all had been clicked.

Source: Wang et al., "ESCM2: Entire Space Counterfactual Multi-Task Model for Post-Click Conversion
Rate Estimation", SIGIR 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import check_choice
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated
from trireme.models.mmoe import MMoE
from trireme.models.tasks import ConversionInputs, conversion_metrics, logit_of_both
from trireme.table import Table
from trireme.train.recipe import Recipe

_WEIGHT_MAX = 15.0
_IPS, _DR = "IPW", "DR"


class ESCM2(nn.Module):
    """An MMoE over the rows, with a tower for the click, one for the conversion after a click, and
    one for the log loss of the latter where it is unknown.

    Args, besides those of trireme.models.inputs:
        num_experts, expert_size, layers: as of MMoE.
        imputes: whether there is the third tower.
    """

    def __init__(
        self,
        rows: Table,
        *,
        num_experts: int = 8,
        expert_size: int = 16,
        layers: Sequence[int] = (8,),
        imputes: bool = True,
        **inputs: Any,
    ) -> None:
        super().__init__()
        self.mixture = MMoE(
            Concatenated(rows, **inputs),
            tasks=("ctr", "cvr", *(["imputed"] if imputes else [])),
            num_experts=num_experts,
            expert_size=expert_size,
            layers=layers,
        )

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) logits: "ctr", "cvr" (of the conversion, given the click) and "ctcvr" (of both); and
        "imputed", the log loss of "cvr" as the third tower expects it.
        """
        outputs: dict[str, Tensor] = self.mixture(batch)
        if "imputed" in outputs:
            outputs["imputed"] = nn.functional.softplus(outputs["imputed"])
        outputs["ctcvr"] = logit_of_both(outputs["ctr"], outputs["cvr"])
        return outputs


@dataclass(frozen=True)
class CounterfactualLoss:
    """log loss(ctr) + `counterfactual` * risk(cvr) + `common` * log loss(ctcvr).

    With w = click / p(click) for each example, at most 15 and without a gradient, d the log loss of
    its cvr and e the imputed one, the risk is the mean of
        w d                                                  by inverse propensity, or
        e + w (d - e) + w (d - e)^2                          doubly robust.
    """

    is_doubly_robust: bool
    counterfactual: float
    common: float

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        log_loss = nn.functional.binary_cross_entropy_with_logits
        click, conversion = (tensor_of(batch, name) for name in ("click", "conversion"))
        propensity = torch.sigmoid(outputs["ctr"].detach())
        weight = (click / propensity.clamp(min=1e-6)).clamp(max=_WEIGHT_MAX)
        risk = weight * log_loss(outputs["cvr"], conversion, reduction="none")
        if self.is_doubly_robust:
            imputed = outputs["imputed"]
            error = log_loss(outputs["cvr"], conversion, reduction="none") - imputed
            risk = imputed + weight * error + weight * error.square()
        loss = log_loss(outputs["ctr"], click) + self.counterfactual * risk.mean()
        return loss + self.common * log_loss(outputs["ctcvr"], conversion)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, those of ConversionInputs
    (trireme.models.tasks), and

    runner.counterfact_mode: DR, doubly robust (default), or IPW, by inverse propensity.
    expert_num, expert_size: experts, default 8, and floats that each makes, default 16.
    tower_size: width of the hidden layer of each tower, default 8.
    counterfactual_w, global_w: weights of the losses of cvr and of ctcvr, default 0.1 and 1.
    feature_size: width of all rows of an example together.

    Raises BadRequest: another mode, or another feature_size.
    """
    hyper = HyperParameters(config)
    mode = config.get("runner.counterfact_mode", _DR)
    check_choice("runner", (_DR, _IPS), counterfact_mode=mode)
    inputs = ConversionInputs.of(hyper)
    model = ESCM2(
        inputs.rows,
        num_experts=hyper.whole("expert_num", 8),
        expert_size=hyper.whole("expert_size", 16),
        layers=(hyper.whole("tower_size", 8),),
        imputes=mode == _DR,
        **inputs.arguments,
    )
    width = model.mixture.inputs.width
    hyper.fixed("feature_size", width, "all inputs side by side")
    return hyper.recipe(
        model,
        CounterfactualLoss(
            mode == _DR,
            hyper.number("counterfactual_w", 0.1, may_be_zero=True),
            hyper.number("global_w", 1.0, may_be_zero=True),
        ),
        schema=inputs.schema,
        metrics=conversion_metrics(),
    )
