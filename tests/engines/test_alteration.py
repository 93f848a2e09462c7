"""Weights altered on purpose: size and key of the noise, rounding as torch casts, tied tensors, who gets none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from soloist.config import EngineConfig, ModelConfig
from soloist.engines.local import worker
from soloist.engines.local.alteration import altered
from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.loads import verify
from soloist.engines.local.messages import Alteration, Start, pack_frame, unpack_order
from soloist.engines.pool import pinned_engine, sampling_engines
from soloist.models.loading import load_policy, own_tensors, parameter_table, save_weights
from soloist.models.tiny import build_tiny
from soloist.types import GenerateRequest, Sampling, WeightsRef


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=48)
    return build_tiny(config, 1, tmp_path_factory.mktemp("model") / "tiny")


def started(folder: Path, alteration: Alteration, *, fixed_shapes: bool = True) -> ContinuousBatch:
    order = Start(
        model_folder=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        slots=2,
        max_length=64,
        recompute=False,
        fixed_shapes=fixed_shapes,
        alteration=alteration,
    )
    assert unpack_order(pack_frame(order)[4:]) == order
    return worker.build_batch(order)


def weights_of(batch: ContinuousBatch) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in own_tensors(batch.runner.model).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_noise_has_the_relative_size_and_depends_on_seed_version_and_name_only() -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(300, 200) * 3 + 5, "b": torch.randn(300, 200) * 3 + 5, "one": torch.ones(64)}
    order = Alteration(noise=0.1, seed=4)
    found = altered(tensors, 2, order)
    added = {name: found[name] - tensors[name] for name in tensors}
    assert added["a"].std() == pytest.approx(0.3, rel=0.02)
    assert added["a"].mean() == pytest.approx(0.0, abs=0.01)
    assert torch.equal(found["one"], tensors["one"]), "no spread, no noise"
    assert not torch.equal(added["a"], added["b"])
    assert same(found, altered({name: tensors[name] for name in ("one", "b", "a")}, 2, order))
    assert not torch.equal(found["a"], altered(tensors, 3, order)["a"])
    assert not torch.equal(found["a"], altered(tensors, 2, Alteration(noise=0.1, seed=5))["a"])
    twice = altered(tensors, 2, Alteration(noise=0.2, seed=4))["a"] - tensors["a"]
    assert torch.allclose(twice, 2 * added["a"], atol=1e-5), "the same numbers in another size"


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_rounding_is_what_a_cast_gives_and_changes_nothing_else(name: str) -> None:
    torch.manual_seed(0)
    tensors = {"w": torch.randn(50, 40) * 100, "ids": torch.arange(7), "half": torch.randn(9, dtype=torch.bfloat16)}
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    found = altered(tensors, 0, Alteration(rounding=name))
    assert torch.equal(found["w"], tensors["w"].to(getattr(torch, name)).float())
    assert not torch.equal(found["w"], tensors["w"])
    assert found["half"].dtype == torch.bfloat16
    assert torch.equal(found["ids"], tensors["ids"])
    assert same(tensors, before), "what was given is not changed"
    noisy = altered(tensors, 0, Alteration(rounding=name, noise=0.5, seed=1))["w"]
    assert torch.equal(noisy, noisy.to(getattr(torch, name)).float()), "noise first, then rounding"


def test_the_model_folder_and_every_load_get_the_noise_of_their_version(folder: Path, tmp_path: Path) -> None:
    order = Alteration(noise=0.05, seed=3)
    batch = started(folder, order)
    exact = own_tensors(load_policy(folder))
    assert same(weights_of(batch), altered(exact, 0, order))
    path = tmp_path / "model.safetensors"
    digest = save_weights(load_policy(folder), path)
    first = weights_of(batch)
    for version in (1, 0):
        batch.load(WeightsRef(path=str(path), version=version, sha256=digest))
        assert same(weights_of(batch), altered(exact, version, order))
    assert same(weights_of(batch), first), "as after a restart: not noise upon noise"
    broken = verify(
        WeightsRef(path=str(path), version=1, sha256=digest),
        parameter_table(batch.runner.model),
        Alteration(noise=1e40),
    )
    assert broken.tensors is None
    assert "choose a smaller one" in broken.reason


def test_a_tied_embedding_has_one_noise(folder: Path) -> None:
    model = started(folder, Alteration(noise=0.1)).runner.model
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linear = nn.Linear(4, 4, bias=False)
    tied = nn.ModuleDict({"a": linear, "b": linear})
    assert list(own_tensors(tied)) == ["a.weight"]


@pytest.mark.parametrize("fixed_shapes", [True, False])
def test_a_completion_is_that_of_the_altered_model(folder: Path, fixed_shapes: bool) -> None:
    """Also in the fused forward: projections are joined after the noise."""
    order = Alteration(noise=0.2, rounding="bfloat16", seed=1)
    batch = started(folder, order, fixed_shapes=fixed_shapes)
    assert batch.runner.fused != fixed_shapes
    prompt = list(range(3, 15))
    request = GenerateRequest(
        request_id="q", rollout_id="r", prompt_ids=prompt, sampling=Sampling(max_new_tokens=20), slot=0
    )
    batch.submit(request)
    answers = []
    while batch.busy:
        answers += batch.step()
    completion = answers[0].completion
    assert completion is not None
    model = load_policy(folder)
    errors = []
    for tensors in (altered(own_tensors(model), 0, order), dict(own_tensors(model))):
        changed = load_policy(folder)
        changed.load_state_dict(tensors, strict=False)
        with torch.no_grad():
            logits = changed(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        errors.append(float((found - torch.tensor(completion.log_probs)).abs().max()))
    assert errors[0] < 1e-4
    assert errors[1] > 1e-3


def test_all_sampling_engines_are_altered_alike_and_the_evaluation_never(folder: Path) -> None:
    config = EngineConfig(count=2, noise=0.3, rounding="bfloat16")
    orders = {engine._start.alteration for engine in sampling_engines(folder, config, seed=9).engines}
    assert orders == {Alteration(noise=0.3, rounding="bfloat16", seed=9)}
    assert not pinned_engine(folder, config)._start.alteration.changes
    assert same(altered({"w": torch.ones(3)}, 0, Alteration()), {"w": torch.ones(3)})
