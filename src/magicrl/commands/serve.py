"""``magicrl serve``: a model behind the Tinker API on this machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rich.console import Console

from magicrl.commands.options import Flag
from magicrl.config.errors import RecipeError
from magicrl.config.model_schema import DType
from magicrl.reporting.wording import print_prose
from magicrl_verifiers.cli import Whole

HOST = "127.0.0.1"


def serve(
    model: str,
    /,
    *,
    name: str | None = None,
    checkpoints: Path = Path("tinker"),
    port: Whole = 8000,
    full_weights: Flag = False,
    dtype: DType = "float32",
    seed: Whole = 0,
) -> int:
    """Serve the Tinker API for one client on this machine, which trains and samples the model.

    Example: magicrl serve Qwen/Qwen3-8B-Base

    Parameters
    ----------
    model
        Model folder or hub name.
    name
        The model's name for clients. Default: MODEL.
    checkpoints
        Folder of what clients save; tinker://MODEL/weights/NAME is a file in it.
    port
        Port on 127.0.0.1.
    full_weights
        Train all weights; clients request LoRA adapters.
    dtype
        Precision of training and sampling: float32 or bfloat16.
    seed
        Seed of sampling requests that name none.
    """
    if dtype == "float16":
        raise RecipeError("--dtype float16: a client's loss is not scaled here; use bfloat16 or float32")
    try:
        from aiohttp import web

        from magicrl.serving.server import TinkerServer
    except ImportError as error:
        raise RecipeError(str(error)) from None
    checkpoints.mkdir(parents=True, exist_ok=True)
    if not os.access(checkpoints, os.W_OK):
        raise RecipeError(f"--checkpoints {checkpoints} cannot be written; choose another folder")
    console = Console(emoji=False, highlight=False)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    name = name or model
    server = TinkerServer(
        model,
        name=name,
        checkpoints=checkpoints,
        full_weights=full_weights,
        dtype=dtype,
        seed=seed,
        report=lambda text: print_prose(console, text),
    )
    print_prose(
        console,
        f"{name} at http://{HOST}:{port}. In the client's terminal: "
        f"export TINKER_BASE_URL=http://{HOST}:{port} TINKER_API_KEY=tml-local",
    )
    try:
        web.run_app(server.app(), host=HOST, port=port, print=None)
    except OSError as error:
        raise ValueError(f"port {port} of {HOST} cannot be opened: {error.strerror}; choose another --port") from None
    return int(server.unsaved)
