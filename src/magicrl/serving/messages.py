"""Messages of the Tinker API that are protocol buffers, as arrays. The package ``tinker`` defines them.

All other messages are JSON, and `magicrl.serving.server` reads and writes those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from magicrl.environments.packages import package
from magicrl.records import FloatArray, TokenArray

_public: Any = package("tinker.proto.tinker_public_pb2", "serve")
_protobuf: Any = package("google.protobuf.message", "serve")
_DTYPES: Mapping[int, Any] = {
    _public.DTYPE_FLOAT32: np.float32,
    _public.DTYPE_INT64: np.int64,
    _public.DTYPE_INT32: np.int32,
}


Datum: TypeAlias = tuple[NDArray[np.int64], Mapping[str, NDArray[Any]]]
"""A training example: ``[N]`` input tokens, and ``loss_fn_inputs`` by name, ``[N]`` each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRequest:
    """A request of ``forward_backward``, or of ``forward``, which makes no gradient.

    Attributes:
        wrong: Why its data cannot be read. It fails where it is run, so that the next step is refused.
    """

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float]
    backward: bool
    wrong: str = ""


def read_loss_request(body: bytes) -> LossRequest:
    """Return the request in a message.

    Raises:
        ValueError: It is not such a message.
    """
    message = _public.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except _protobuf.DecodeError as error:
        raise ValueError(f"the request is not a ForwardBackwardRequest: {error}") from None
    config = {name: value.number for name, value in message.loss_fn_config_v2.items()} or message.loss_fn_config
    data: list[Datum] = []
    wrong = ""
    try:
        data += (_datum(index, datum) for index, datum in enumerate(message.data))
    except ValueError as error:
        wrong = str(error)
    return LossRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        config=dict(config),
        backward=not message.forward_only,
        wrong=wrong,
    )


def _datum(index: int, datum: Any) -> Datum:
    chunks: list[NDArray[Any]] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ValueError(f"datum {index} has a chunk that is no text; this server trains language models only")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
    tokens = np.concatenate([np.zeros(0, np.int64), *chunks]).astype(np.int64)
    inputs: dict[str, NDArray[Any]] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.HasField("sparse_csr") or tensor.dtype not in _DTYPES:
            raise ValueError(f"datum {index}: {name} is sparse or bfloat16; send a dense float32 or int64 tensor")
        inputs[name] = np.frombuffer(tensor.dense, dtype=_DTYPES[tensor.dtype])
        if name == "target_tokens" and tensor.dtype == _public.DTYPE_FLOAT32:
            raise ValueError(f"datum {index}: target_tokens are floats; send int64")
        shape = list(tensor.shape) or [len(inputs[name])]
        if shape != [len(tokens)]:
            raise ValueError(
                f"datum {index}: {name} has shape {shape}, and its input has {len(tokens)} tokens; "
                "this server takes one value per token"
            )
    return tokens, inputs


def loss_response(logprobs: Sequence[FloatArray], metrics: Mapping[str, float]) -> bytes:
    """Return the answer to a ``LossRequest``: the log-probs of each datum's target tokens, and metrics."""
    record = _public.ArrayRecord(num_datums=len(logprobs))
    offsets = np.cumsum([0, *(values.nbytes for values in logprobs)]).astype(np.int64)
    record.fields["logprobs"].CopyFrom(
        _public.BatchedTensor(
            data=b"".join(values.tobytes() for values in logprobs),
            offsets=offsets.tobytes(),
            dtype=_public.DTYPE_FLOAT32,
        )
    )
    message = _public.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def sample_response(
    sequences: Iterable[tuple[TokenArray, FloatArray, bool]], prompt_logprobs: FloatArray | None
) -> bytes:
    """Return the answer to a request of ``sample``.

    Args:
        sequences: Tokens, their log-probs, and whether a stop ended them.
        prompt_logprobs: ``[P]``, NaN where there is none. None if they were not requested.
    """
    message = _public.SampleResponse()
    for tokens, logprobs, stopped in sequences:
        message.sequences.add(
            stop_reason=_public.STOP_REASON_STOP if stopped else _public.STOP_REASON_LENGTH,
            tokens=tokens.tobytes(),
            logprobs=logprobs.tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.tobytes()
    return message.SerializeToString()
