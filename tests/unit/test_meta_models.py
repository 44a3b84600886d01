"""Models that learn how to learn a task: the step, and what they reach on new tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from examples.planted.clicks import exact_auc
from tests.seeds import SEED
from trireme.config import Config
from trireme.data import Batch, Ragged
from trireme.errors import BadRequest
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.models import MAML, MetaHeac, zoo
from trireme.models.maml import Convolutions
from trireme.models.meta_learning import sgd, tasks_of
from trireme.models.metaheac import Tasks


def test_steps_are_those_of_sgd_and_constants_for_gradients() -> None:
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    adapted = sgd(lambda now: (now["w"] ** 2).sum(), {"w": w}, lr=0.1, steps=2)["w"]
    torch.testing.assert_close(adapted, w * 0.8**2)
    (adapted**2).sum().backward()
    torch.testing.assert_close(w.grad, 2 * adapted)
    with torch.no_grad():
        assert not sgd(lambda now: now["w"].sum(), {"w": w}, lr=0.1, steps=1)["w"].requires_grad


def test_tasks_of_a_batch_have_examples_to_learn_from_and_to_judge_by() -> None:
    batch = Batch(
        {"task": torch.tensor([1, 0, 1, 0, 1]), "is_query": torch.tensor([0, 0, 1, 1, 1])}
    )
    places = [(known.tolist(), asked.tolist()) for known, asked in tasks_of(batch)]
    assert places == [([1], [3]), ([0], [2, 4])]


def test_maml_learns_to_tell_apart_new_characters() -> None:
    torch.manual_seed(SEED)
    print(f"SEED={SEED}")
    values = {
        "n_way": 2, "k_query": 3, "imgsize": 16, "bn_channel": 8, "update_step": 2,
        "meta_optimizer": {"class": "Adam", "learning_rate": 0.01},
    }  # fmt: skip
    recipe = zoo.load("maml").create(Config({"hyper_parameters": values}))
    assert isinstance(recipe.model, MAML)
    assert recipe.schema.names == ("support", "support_label", "query", "query_label")

    def tasks(num: int) -> Batch:
        """Two characters that no other task has, each with noise."""
        shapes = torch.randn(num, 2, 256)
        known, asked = torch.tensor([0, 1]), torch.tensor([0, 1, 1, 0, 0, 1])
        parts = {}
        for name, classes in (("support", known), ("query", asked)):
            images = shapes[:, classes] + 0.4 * torch.randn(num, len(classes), 256)
            parts[name] = images.flatten(1)
            parts[f"{name}_label"] = classes.float().expand(num, -1).contiguous()
        return recipe.prepare(Batch(parts))

    for _ in range(15):
        batch = tasks(3)
        recipe.optimizer.zero_grad()
        recipe.loss(recipe.model(batch), batch).backward()
        recipe.optimizer.step()
    tested = tasks(20)
    with torch.no_grad():
        logits = recipe.model.eval()(tested)
    assert logits.shape == (20 * 8, 2)
    assert not logits.view(20, 8, 2)[:, :2].any()
    recipe.metrics[0].update(logits, tested["answer"])
    assert recipe.metrics[0].compute()["recall"] > 0.8


def user_ids(draw: np.random.Generator, num: int, *, features: tuple[int, int]) -> list[Any]:
    """Users as PaddleRec's readers yield them. Static feature 0 says the label, by its parity."""
    static, ads = features
    labels = draw.integers(0, 2, num)
    lengths = draw.integers(0, 6, (num, 7))
    first = 2 * draw.integers(0, 5, (num, 1)) + labels[:, None]
    ids = [
        np.hstack([first, draw.integers(0, 9, (num, static - 1))]),
        draw.integers(0, 9, (num, 50)),
        lengths,
        draw.integers(0, 9, (num, ads)),
    ]
    return [np.concatenate([one.reshape(-1) for one in ids]), labels]


def task_batch(draw: np.random.Generator, recipe: Any, *, num_tasks: int, sizes: Any) -> Batch:
    """One example with users of several tasks."""
    columns: dict[str, Any] = {}
    for part, size in zip(("support", "query"), sizes, strict=True):
        sets = [user_ids(draw, size, features=(2, 1)) for _ in range(num_tasks)]
        for name, place in ((part, 0), (f"{part}_label", 1)):
            values = torch.from_numpy(np.concatenate([one[place] for one in sets]))
            columns[name] = Ragged(values, torch.tensor([0, len(values)]))
    return recipe.prepare(Batch(columns))


def test_metaheac_learns_whom_a_campaign_reaches() -> None:
    torch.manual_seed(SEED)
    print(f"SEED={SEED}")
    values = {
        "max_idxs": [[9, 9], [9] * 7, [9]], "embed_dim": 4, "mlp_dims": [8], "num_expert": 2,
        "num_output": 2, "task_count": 2, "optimizer": {"global_learning_rate": 0.02},
    }  # fmt: skip
    recipe = zoo.load("metaheac").create(Config({"hyper_parameters": values}))
    model, draw = recipe.model, np.random.default_rng(SEED)
    assert isinstance(model, MetaHeac)
    with embedded() as cluster:
        set_default(cluster)
        batches = [task_batch(draw, recipe, num_tasks=2, sizes=(16, 16)) for _ in range(40)]
        trainer = tr.Trainer.from_recipe(recipe, strategy=tr.Strategy("sync"), progress=False)
        trainer.fit(batches)
        tested = task_batch(draw, recipe.evaluation, num_tasks=1, sizes=(20, 300))
        with torch.no_grad():
            logits = model.eval()(tested)
        is_query = tested["is_query"] > 0
        assert is_query.sum() == 300
        assert not logits[~is_query].any()
        auc = exact_auc(logits[is_query].double().numpy(), tested["label"][is_query].numpy() > 0)
        assert auc > 0.9
        figures = trainer.evaluate([tested], model=recipe.evaluation)
        assert figures["auc"] == pytest.approx(auc, abs=1e-3)


def test_a_task_of_metaheac_is_learnt_by_rows_and_net_alike() -> None:
    """A copy of the whole model that makes the step gives the same outputs."""
    values = {
        "max_idxs": [[9, 9], [9] * 7, [9]], "embed_dim": 4, "mlp_dims": [8, 8], "num_expert": 2,
        "task_count": 1, "local_lr": 0.5,
    }  # fmt: skip
    recipe = zoo.load("metaheac").create(Config({"hyper_parameters": values}))
    model, draw = recipe.model.train(), np.random.default_rng(SEED)
    batch = task_batch(draw, recipe, num_tasks=1, sizes=(6, 5))
    with embedded() as cluster:
        set_default(cluster)
        logits = model(batch).detach()
        twin = {name: nn.Embedding(10, 4) for name in model.features}
        for name, part in zip(model.features, model.rows, strict=True):
            rows = part.eval()({name: torch.arange(10)})
            twin[name].weight.data.copy_(rows)

    def outputs() -> torch.Tensor:
        vectors = torch.zeros(11, len(twin), 4)
        for f, (name, rows) in enumerate(twin.items()):
            column = batch[name]
            for b in range(11):
                ids = column.values[column.offsets[b] : column.offsets[b + 1]]
                if len(ids):
                    vectors[b, f] = rows(ids).mean(0)
        out: torch.Tensor = model.net(vectors)
        return out

    log_loss = nn.functional.binary_cross_entropy_with_logits
    log_loss(outputs()[:6], batch["label"][:6]).backward()
    with torch.no_grad():
        for module in (model.net, *twin.values()):
            for parameter in module.parameters():
                parameter -= 0.5 * parameter.grad
        torch.testing.assert_close(logits[6:], outputs()[6:], rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    for name, values, message in (
        ("maml", {"base_optimizer": {"class": "Adam"}}, "expected SGD, found 'Adam'"),
        ("maml", {"imgsize": 8}, "expected images larger than 8 x 8"),
        ("metaheac", {"max_idxs": [[1], [2], [3]]}, "expected 3 lists, the second of 7, found"),
        ("autofis", {"pairs": 3}, "pairs: expected 741, .* found 3"),
        ("autofis", {"optimizer": {"class": "SGD"}}, "expected Adam with autofis, found SGD"),
        ("fgcnn", {"stride": [2, 1]}, "stride: expected 1, 1, found"),
        ("fgcnn", {"feature_name": ["a"]}, "feature_name: expected 39 names, .* found 1"),
        ("sign", {"pred_edges": 0}, "pred_edges: expected 1, found 0"),
        ("sign", {"l0_para": [1, 2]}, "l0_para: expected 3 numbers, found"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load(name).create(Config({"hyper_parameters": values}))
    with pytest.raises(BadRequest, match="stage: expected 0 or 1, found 2"):
        zoo.load("autofis").create(Config({"stage": 2}))
    with pytest.raises(BadRequest, match="infer_train_epoch: expected an integer >= 1"):
        zoo.load("metaheac").create(Config({"runner": {"infer_train_epoch": 0}}))
    one = Ragged(torch.arange(3), torch.tensor([0, 3]))
    columns = dict.fromkeys(("support", "support_label", "query", "query_label"), one)
    with pytest.raises(BadRequest, match="expected 60 ids of each of 3 users, found 3 of all"):
        Tasks(1, 2, 1)(Batch(columns))
    with pytest.raises(BadRequest, match="'support' of each of 2 tasks, found 3 of all"):
        Tasks(2, 2, 1)(Batch(columns))
    assert Convolutions(side=16, channels=4)(torch.zeros(2, 1, 16, 16)).shape == (2, 5)
