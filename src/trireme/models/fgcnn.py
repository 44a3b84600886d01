"""FGCNN: convolutions along the features make new ones, for the products and an MLP.

Source: Liu et al., "Feature Generation by Convolutional Neural Network for Click-Through Rate
Prediction", WWW 2019.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.models.columns import SplitIds
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors, Vocabularies
from trireme.models.layers import mlp, normalized_mlp, pairwise_products
from trireme.train.recipe import Recipe


class FGCNN(nn.Module):
    """logit = MLP(vectors and new vectors, the products of each pair of them).

    Args:
        fields: makes N times 2 D floats of a batch: of each input the vector that the convolutions
            see, then the one that the products see.
        windows, filters, pools, maps: of each convolution: the inputs that it sees at once; floats
            that it makes of them; how many it joins to their maximum; and how many new vectors are
            made of each that is left.
        layers: widths of the MLP's hidden layers, normalized by batch.
        dropout: behind each of them, in training.

    Raises BadRequest: the sizes of the convolutions differ in number, or leave no inputs.
    """

    def __init__(
        self,
        fields: FeatureVectors | Vocabularies,
        *,
        windows: Sequence[int] = (7, 7, 7, 7),
        filters: Sequence[int] = (14, 16, 18, 20),
        pools: Sequence[int] = (2, 2, 2, 2),
        maps: Sequence[int] = (3, 3, 3, 3),
        layers: Sequence[int] = (128,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fields, num, dim = fields, fields.num_inputs, fields.dim // 2
        if not len(windows) == len(filters) == len(pools) == len(maps):
            raise BadRequest(
                f"FGCNN: expected as many windows, filters, pools and maps, found {windows},"
                f" {filters}, {pools} and {maps}"
            )
        self.convolutions, self.recombinations = nn.ModuleList(), nn.ModuleList()
        num_left, num_vectors = num, num
        sizes = zip((1, *filters), windows, filters, pools, maps, strict=False)
        for before, window, after, pool, num_maps in sizes:
            if (num_left := num_left // pool) == 0:
                raise BadRequest(f"FGCNN: expected pools that leave inputs, found {pools} of {num}")
            convolution = nn.Conv2d(before, after, (window, 1), padding="same")
            behind = (nn.BatchNorm2d(after), nn.Tanh(), nn.MaxPool2d((pool, 1)))
            self.convolutions.append(nn.Sequential(convolution, *behind))
            size = num_left * dim
            self.recombinations.append(mlp([after * size, num_maps * size]))
            num_vectors += num_maps * num_left
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.mlp = normalized_mlp([num_vectors * dim + num_pairs, *layers, 1], dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields_BNE = self.fields(batch).view(-1, self.fields.num_inputs, self.fields.dim)
        maps, vectors = fields_BNE.chunk(2, 2)
        made, maps, dim = [vectors], maps[:, None], vectors.shape[2]
        for convolve, recombine in zip(self.convolutions, self.recombinations, strict=True):
            maps = convolve(maps)
            new = torch.tanh(recombine(maps.flatten(1)))
            made.append(new.view(-1, new.shape[1] // dim, dim))
        all_vectors = torch.cat(made, 1)
        x = torch.cat([all_vectors.flatten(1), pairwise_products(all_vectors)], 1)
        logits: Tensor = self.mlp(x)
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    conv_kernel_width, conv_filters, pooling_width, new_maps: of each convolution, default 7, 7, 7,
        7; 14, 16, 18, 20; 2, 2, 2, 2; 3, 3, 3, 3. stride: of all, 1, 1.
    dnn_hidden_units: widths of the MLP's hidden layers, default 128; dnn_dropout: default 0.
    feature_dim: floats of a vector, default 20; a row has two of them.

    With feature_name, as in PaddleRec's fgcnn, the inputs are "ids", one of each of these features,
    and label; each has a table of its name. sparse_inputs_slots and dense_inputs_slots add up to
    their number.

    Raises BadRequest: another stride, or another number of features.
    """
    hyper = HyperParameters(config)
    if (stride := hyper.sizes("stride", (1, 1))) != (1, 1):
        raise BadRequest(f"hyper_parameters.stride: expected 1, 1, found {stride}")
    dim = 2 * hyper.whole("feature_dim", 20)
    names = hyper.names("feature_name", ("",)) if hyper.get("feature_name") is not None else ()
    fields: FeatureVectors | Vocabularies
    if names:
        num = hyper.whole("sparse_inputs_slots", 26)
        num += hyper.whole("dense_inputs_slots", 13, least=0)
        if num != len(names):
            raise BadRequest(
                f"hyper_parameters.feature_name: expected {num} names, for sparse_inputs_slots and"
                f" dense_inputs_slots, found {len(names)}"
            )
        fields = Vocabularies({name: hyper.table(name, dim=dim) for name in names})
    else:
        fields = FeatureVectors(hyper.table(dim=dim), **hyper.inputs())
    model = FGCNN(
        fields,
        windows=hyper.sizes("conv_kernel_width", (7, 7, 7, 7), least=1),
        filters=hyper.sizes("conv_filters", (14, 16, 18, 20), least=1),
        pools=hyper.sizes("pooling_width", (2, 2, 2, 2), least=1),
        maps=hyper.sizes("new_maps", (3, 3, 3, 3), least=1),
        layers=hyper.sizes("dnn_hidden_units", (128,)),
        dropout=hyper.share("dnn_dropout", 0.0),
    )
    if not names:
        return click_recipe(model, hyper)
    schema = Schema([Sparse("ids"), Label("label")])
    recipe = click_recipe(model, hyper, label="label", schema=schema)
    return replace(recipe, prepare=SplitIds("ids", names))
