"""Weights verified beside decoding: order, refusals, the bell, and the options of the child that go with speed."""

import os
import select
from pathlib import Path

import pytest
import torch
from torch import nn

from soloist.config import ModelConfig
from soloist.engines.local import worker
from soloist.engines.local.loads import Loads, verify
from soloist.engines.local.messages import Start
from soloist.engines.local.model_runner import ModelRunner
from soloist.errors import UserError
from soloist.models.loading import load_policy, parameter_table, save_weights
from soloist.models.tiny import build_tiny
from soloist.types import WeightsRef


@pytest.fixture
def loads() -> Loads:
    return Loads(parameter_table(nn.Linear(3, 2)))


def published(folder: Path, version: int, *, rows: int = 2) -> WeightsRef:
    path = folder / f"{version}.safetensors"
    torch.manual_seed(version)
    return WeightsRef(path=str(path), version=version, sha256=save_weights(nn.Linear(3, rows), path))


def waited(loads: Loads) -> bool:
    return bool(select.select([loads], [], [], 20)[0])


def test_loads_come_back_verified_and_in_order(loads: Loads, tmp_path: Path) -> None:
    refs = [published(tmp_path, 1), published(tmp_path, 2, rows=5), published(tmp_path, 3)]
    refs.append(WeightsRef(path=str(tmp_path / "absent"), version=4, sha256=""))
    assert loads.collect() == []
    for ref in refs:
        loads.ask(ref)
    assert loads.pending == 4
    found = []
    while len(found) < 4:
        assert waited(loads)
        found += loads.collect()
    assert [verified.weights.version for verified in found] == [1, 2, 3, 4]
    assert [verified.tensors is not None for verified in found] == [True, False, True, False]
    assert "belong to another model" in found[1].reason
    assert loads.pending == 0
    assert not select.select([loads], [], [], 0)[0], "the bell is silent when nothing is left"
    loads.close()


def test_a_closed_reader_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    loads = Loads(parameter_table(nn.Linear(3, 2)))
    loads.ask(published(tmp_path, 1))
    loads.close()
    assert not loads._thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_negative_version_is_refused_before_the_file_is_read() -> None:
    verified = verify(WeightsRef(path="/nowhere", version=-2, sha256=""), {})
    assert verified.tensors is None
    assert "version is -2" in verified.reason


def start_order(folder: Path, **options: object) -> Start:
    plain = {
        "model_folder": str(folder), "dtype": "float32", "device": "cpu", "threads": 1, "slots": 2, "max_length": 32,
        "recompute": False, "fixed_shapes": False,
    }  # fmt: skip
    return Start(**(plain | options))  # type: ignore[arg-type]


def test_options_of_the_child_take_effect_or_are_refused(tmp_path: Path) -> None:
    folder = build_tiny(ModelConfig(hidden_size=16, layers=1, heads=2, mlp_size=24), 0, tmp_path / "m")
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        batch = worker.build_batch(start_order(folder, cores=(core,), prefill_chunk=7))
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
    assert batch.prefill_chunk == 7
    with pytest.raises(UserError, match=r"cores is \[4096\]"):
        worker.build_batch(start_order(folder, cores=(4096,)))
    with pytest.raises(ValueError, match="cuda_graphs is true on device cpu"):
        worker.build_batch(start_order(folder, cuda_graphs=True))


def test_cuda_graphs_are_refused_where_no_step_could_be_recorded(tmp_path: Path) -> None:
    folder = build_tiny(ModelConfig(hidden_size=16, layers=1, heads=2, mlp_size=24), 0, tmp_path / "m")
    with pytest.raises(ValueError, match="move the engine"):
        ModelRunner(load_policy(folder), slots=2, max_length=32, cuda_graphs=True)
