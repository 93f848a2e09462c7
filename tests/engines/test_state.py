"""The tables of slots: the short path of running rows against the general one."""

import copy

import pytest
import torch

from soloist.engines.local.scheduler import Seat
from soloist.engines.local.state import SlotState
from soloist.types import GenerateRequest, Sampling

SLOTS, MAX_LENGTH, VOCAB = 5, 24, 16


def seated(temperature: float, stop_token_ids: list[int]) -> SlotState:
    """Slots 0, 2 and 4 run; what they are asked for differs, and one of them has its own temperature and stops."""
    state = SlotState(SLOTS, MAX_LENGTH, torch.device("cpu"))
    seats = []
    for i, slot in enumerate((0, 2, 4)):
        special = slot == 2
        sampling = Sampling(
            max_new_tokens=3 + 4 * i,
            temperature=temperature if special else 1.0,
            stop_token_ids=stop_token_ids if special else [],
        )
        request = GenerateRequest(
            request_id=f"{i}", rollout_id=f"{i}", prompt_ids=[1] * (2 + i), key=i, sampling=sampling
        )
        seats.append(Seat(request, slot, 0, 0))
    state.seat(seats)
    state.active_S[torch.tensor([0, 2, 4])] = True
    return state


@pytest.mark.parametrize(("temperature", "stops"), [(1.0, []), (0.5, []), (0.0, []), (1.0, list(range(0, VOCAB, 2)))])
def test_running_rows_are_appended_to_as_in_general(temperature: float, stops: list[int]) -> None:
    short = seated(temperature, stops)
    general = copy.deepcopy(short)
    slots = [4, 0, 2]
    rows, slots_R = short.running(slots), torch.tensor(slots)
    generator = torch.Generator().manual_seed(3)
    ended = []
    for step in range(10):
        logits = torch.randn(3, VOCAB, generator=generator)
        if step == 8:
            logits[1, 2] = torch.nan
        found, wanted = short.append_running(rows, logits), general.append(slots_R, logits)
        assert torch.equal(found, wanted)
        ended.append(found.tolist())
    for table in ("tokens_SP", "versions_SP", "lengths_S", "_finite_S"):
        assert torch.equal(getattr(short, table), getattr(general, table)), table
    torch.testing.assert_close(short.log_probs_SP, general.log_probs_SP, rtol=0, atol=0, equal_nan=True)
    # Slot 0 was asked for three tokens; slot 4 goes on to its eleventh.
    assert [row[1] for row in ended[:3]] == [False, False, True]
    assert not any(row[0] for row in ended[:8])
    assert (rows.temperatures_R is None, rows.stops_RN is None) == (temperature == 1, not stops)


def test_a_slot_forgets_what_the_last_request_wanted_specially() -> None:
    state = seated(0.5, [3])
    assert state.running([0, 4]).temperatures_R is None
    rows = state.running([0, 2])
    assert rows.temperatures_R is not None
    assert rows.stops_RN is not None
    plain = GenerateRequest(request_id="x", rollout_id="x", prompt_ids=[1], sampling=Sampling(max_new_tokens=2))
    state.seat([Seat(plain, 2, 0, 0)])
    rows = state.running([0, 2])
    assert rows.temperatures_R is None
    assert rows.stops_RN is None
