"""What frozen first layers give is computed once per step: the K value updates and the values pass share it.

The layers that can be shared are those before the first one with a trainable parameter; embeddings must be frozen, too.
Guarantees: results are the same bit for bit as without sharing, since the same kernels made them. A model without a
list of layers, or whose layers give more than a tensor, shares nothing.
Not covered: which parameters are frozen (`value.freeze_parameters`). With the default ones nothing can be shared but
the embeddings: the norm before the first attention trains, so everything behind it changes with each update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from soloist.models.rows import MicroBatch


def frozen_layers(backbone: PreTrainedModel) -> list[nn.Module]:
    """The longest run of first layers in which nothing trains; none if anything outside of the layers comes first.

    Only input embeddings come before the layers; what stands behind them (a last norm) may train.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or _trains(backbone.get_input_embeddings()):
        return []
    found: list[nn.Module] = []
    for layer in layers:
        if _trains(layer):
            break
        found.append(layer)
    return found


class FrozenStates:
    """Output of the last frozen layer for each micro-batch of a step.

    Example: `recall = FrozenStates(value.backbone)`, then `value.values(micro, recall)` as often as wanted. Make a new
    one for each step and whenever the frozen weights were replaced.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        self._layers = frozen_layers(backbone)
        self._states: dict[int, tuple[MicroBatch, Tensor]] = {}

    @contextmanager
    def of(self, micro: MicroBatch) -> Iterator[None]:
        """Inside, the frozen layers are skipped if their output for `micro` is known; else it is kept."""
        if not self._layers:
            yield
            return
        known = self._states.get(id(micro))
        if known is not None:
            undo = _skip(self._layers, known[1])
        else:
            # The micro-batch is kept beside its states, so that its id is not given to another one.
            hook = self._layers[-1].register_forward_hook(lambda m, a, output: self._keep(micro, output))
            undo = [hook.remove]
        try:
            yield
        finally:
            for one in undo:
                one()

    def _keep(self, micro: MicroBatch, output: Any) -> None:
        if isinstance(output, Tensor):
            self._states[id(micro)] = micro, output.detach()


def _skip(layers: list[nn.Module], states: Tensor) -> list[Any]:
    """Let each of the layers return `states` at once; the calls returned undo it."""
    for layer in layers:
        # An attribute of the instance comes before the method of its class.
        object.__setattr__(layer, "forward", lambda *arguments, **options: states)
    return [lambda layer=layer: object.__delattr__(layer, "forward") for layer in layers]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
