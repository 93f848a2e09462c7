"""What parent and child tell each other: typed msgpack messages in length-prefixed frames. No pickle.

Guarantees: a frame above `MAX_FRAME_BYTES` is refused before it is buffered; a frame that is not exactly one of the
messages below raises `FrameError`, never anything else; tensors do not travel here (weights go by file).
Not covered: who is at the other end. The socket pair is unnamed and inherited, so nobody else can connect to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from soloist.types import Completion, GenerateRequest, Record, WeightsRef

MAX_FRAME_BYTES = 64 * 1024 * 1024
# Four bytes, big-endian, as on any network.
_PREFIX = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are not a message of this protocol. The connection can't be trusted any more."""


class Counters(Record, frozen=True, kw_only=True):
    """What the child has done so far and holds now."""

    version: int
    running: int
    waiting: int
    tokens: int
    """Tokens sampled since the child started."""
    busy_s: float
    """Seconds in forward passes since the child started."""


class Alteration(Record, frozen=True, kw_only=True):
    """How weights are changed on purpose before they are used (`alteration.py`).

    Example: `Alteration(noise=0.02, rounding="bfloat16", seed=7)`; `Alteration()` leaves them as they are.
    """

    noise: float = 0.0
    """Standard deviation of what is added, relative to that of each tensor."""
    rounding: Literal["none", "bfloat16", "float8_e4m3fn"] = "none"
    """Type that numbers are cast to and back."""
    seed: int = 0

    @property
    def changes(self) -> bool:
        """Whether anything is done at all."""
        return self.noise > 0 or self.rounding != "none"


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """First order: build the model and the cache."""

    model_folder: str
    dtype: str
    device: str
    threads: int
    slots: int
    max_length: int
    recompute: bool
    """Compute the caches anew after a load."""
    fixed_shapes: bool
    vocab_size: int | None = None
    """Ids from here on can't be sampled; None takes the vocabulary of the model's config."""
    prefill_chunk: int = 256
    """Prompt tokens computed in one step beside running requests."""
    cores: tuple[int, ...] = ()
    """Cores that the process may use; empty leaves the choice to the system."""
    cuda_graphs: bool = False
    """Record decode steps as CUDA graphs."""
    alteration: Alteration = Alteration()
    """What is done to all weights, those of the model folder too."""


class Generate(Record, frozen=True, kw_only=True, tag="generate"):
    """Continue a prompt."""

    request: GenerateRequest


class Cancel(Record, frozen=True, kw_only=True, tag="cancel"):
    """Forget one request: nobody waits for it any more. It is not answered."""

    request_id: str


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """Forget the prefixes of a rollout."""

    rollout_id: str


class Abort(Record, frozen=True, kw_only=True, tag="abort"):
    """End the requests of these rollouts (None: all) with finish reason `abort`."""

    rollout_ids: list[str] | None


class Load(Record, frozen=True, kw_only=True, tag="load"):
    """Swap the weights before the next decode step."""

    weights: WeightsRef


class AskHealth(Record, frozen=True, kw_only=True, tag="ask_health"):
    """Answer with `Health`."""


class Close(Record, frozen=True, kw_only=True, tag="close"):
    """Exit with code 0."""


class Ready(Record, frozen=True, kw_only=True, tag="ready"):
    """The model is built and serves version 0."""

    vocab_size: int


class Completed(Record, frozen=True, kw_only=True, tag="completed"):
    """A request is done."""

    request_id: str
    completion: Completion
    counters: Counters


class Refused(Record, frozen=True, kw_only=True, tag="refused"):
    """A request could not be served; the child goes on."""

    request_id: str
    reason: str


class Loaded(Record, frozen=True, kw_only=True, tag="loaded"):
    """All tensors were verified and swapped; the next token carries this version."""

    version: int


class NotLoaded(Record, frozen=True, kw_only=True, tag="not_loaded"):
    """The weights did not pass verification; nothing changed."""

    version: int
    reason: str


class Health(Record, frozen=True, kw_only=True, tag="health"):
    """Answer to `AskHealth`."""

    counters: Counters


Order = Start | Generate | Cancel | Release | Abort | Load | AskHealth | Close
"""What the parent says."""
Reply = Ready | Completed | Refused | Loaded | NotLoaded | Health
"""What the child says."""

# Each decoder compiles its whole schema, so they are made once.
_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_replies = msgspec.msgpack.Decoder(Reply)


def pack_frame(message: Order | Reply) -> bytes:
    """One message as bytes for the socket. Raises FrameError when it is too large to send."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a {type(message).__name__} of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _PREFIX.pack(len(payload)) + payload


def unpack_order(payload: bytes) -> Order:
    """The parent's message in a frame. Raises FrameError."""
    # RecursionError: a few bytes of msgpack can nest deeper than Python's stack.
    try:
        return _orders.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"{len(payload)} bytes are no order: {error}") from error


def unpack_reply(payload: bytes) -> Reply:
    """The child's message in a frame. Raises FrameError."""
    try:
        return _replies.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"{len(payload)} bytes are no reply: {error}") from error


class FrameBuffer:
    """Cuts a byte stream into frames, however the stream was chopped on its way."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that are complete now. Raises FrameError as soon as a prefix announces too much."""
        self._bytes += data
        while len(self._bytes) >= _PREFIX.size:
            (size,) = _PREFIX.unpack_from(self._bytes)
            # Checked on the prefix alone: waiting for the payload would already fill the memory.
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame announces {size} bytes, above the limit of {MAX_FRAME_BYTES}")
            end = _PREFIX.size + size
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[_PREFIX.size : end])
            del self._bytes[:end]
            yield payload
