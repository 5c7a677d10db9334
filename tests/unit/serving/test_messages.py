"""Requests of the Tinker API whose contents this server refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as proto

from magicrl.serving.messages import read_loss_request


def request(chunk: dict[str, Any], tensor: dict[str, Any]) -> bytes:
    """Return a request of one datum of three tokens, whose chunk and weights are these."""
    name = tensor.pop("name", "weights")
    inputs = {name: proto.Tensor(dense=np.ones(3, np.float32).tobytes(), dtype=proto.DTYPE_FLOAT32, shape=[3])}
    inputs[name].MergeFrom(proto.Tensor(**tensor))
    text = proto.Chunk(encoded_text=proto.EncodedTextChunk(tokens=np.arange(3, dtype=np.int32).tobytes()))
    datum = proto.Datum(model_input=[text if not chunk else proto.Chunk(**chunk)], loss_fn_inputs=inputs)
    return proto.ForwardBackwardRequest(data=[datum], loss_fn="cross_entropy").SerializeToString()


@pytest.mark.parametrize(
    ("chunk", "tensor", "message"),
    [
        ({"image": proto.ImageChunk()}, {}, "datum 0 has a chunk that is no text"),
        ({}, {"sparse_csr": proto.SparseCsr()}, "datum 0: weights is sparse or bfloat16"),
        ({}, {"dtype": proto.DTYPE_BFLOAT16}, "datum 0: weights is sparse or bfloat16"),
        ({}, {"shape": [1]}, r"datum 0: weights has shape \[3, 1\], and its input has 3 tokens"),
        ({}, {"name": "target_tokens"}, "datum 0: target_tokens are floats; send int64"),
    ],
)
def test_a_datum_of_other_contents_is_refused(chunk: dict[str, Any], tensor: dict[str, Any], message: str) -> None:
    read = read_loss_request(request(chunk, dict(tensor)))
    assert re.match(message, read.wrong), "it fails where it is run, so that the next step is refused"


def test_a_whole_request_is_read_and_half_a_message_is_refused() -> None:
    whole = request({}, {})
    (tokens, inputs) = read_loss_request(whole).data[0]
    assert tokens.tolist() == [0, 1, 2]
    assert inputs["weights"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="the request is not a ForwardBackwardRequest"):
        read_loss_request(whole[:-1])
