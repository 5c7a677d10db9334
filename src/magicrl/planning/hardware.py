"""Machines: memory, arithmetic, bandwidths and links of one accelerator, from the package's or a user's file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from magicrl.config.loader import shipped_table
from magicrl_verifiers.references import did_you_mean

GIB = 2.0**30


def _times(unit: float) -> AfterValidator:
    """Return a validator that converts the unit of a data sheet to a base unit."""
    return AfterValidator(lambda value: value * unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator and its links in base units, validated from a table of a file. Links count one direction."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str  # as on the command line
    memory: Annotated[PositiveFloat, Field(validation_alias="memory_gib"), _times(GIB)]
    usable: Annotated[float, Field(gt=0, le=1)] = 0.92  # share of ``memory`` available to plans
    flops: Annotated[PositiveFloat, Field(validation_alias="bf16_tflops"), _times(1e12)]  # dense
    bandwidth: Annotated[PositiveFloat, Field(validation_alias="memory_tb_s"), _times(1e12)]
    link: Annotated[PositiveFloat, Field(validation_alias="link_gb_s"), _times(1e9)]  # inside a node
    # between nodes, for each accelerator
    network: Annotated[PositiveFloat, Field(validation_alias="network_gb_s"), _times(1e9)]
    # between an accelerator and its host's memory, assumed to be independent for each accelerator
    host: Annotated[PositiveFloat, Field(validation_alias="host_gb_s"), _times(1e9)] = 31.5e9
    # of a node, for each accelerator
    host_memory: Annotated[PositiveFloat, Field(validation_alias="host_memory_gib"), _times(GIB)] = 128 * GIB
    gpus_per_node: PositiveInt
    # contexts, communication buffers and fragmentation
    runtime: Annotated[NonNegativeFloat, Field(validation_alias="runtime_gib"), _times(GIB)] = 3.0 * GIB
    source: str = ""  # source of the figures
    cuda_names: tuple[str, ...] = ()  # CUDA's names of the accelerators with this arithmetic rate

    @property
    def budget(self) -> float:
        """Bytes available to plans."""
        return self.memory * self.usable


def load_hardware(name: str) -> Hardware:
    """Return the accelerator called ``name``, or the only one of a TOML file of the same form.

    Raises:
        ValueError: an unknown name, or a file without exactly one valid table.
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            found = _by_name(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path}: not a hardware file: {error}") from None
        except ValidationError as error:
            mistakes = [(".".join(map(str, one["loc"])), one) for one in error.errors()]
            told = (
                f"{key} is missing" if one["type"] == "missing" else f"{key} = {one['input']!r}: {one['msg']}"
                for key, one in mistakes
            )
            raise ValueError(f"{path}: not a hardware file: {'; '.join(told)}") from None
        if len(found) != 1:
            raise ValueError(f"{path}: must hold exactly one table, [name], but has {len(found)}")
        return found.popitem()[1]
    known = known_hardware()
    if name not in known:
        hint = f"{did_you_mean(name, known)} Known: {', '.join(known)}"
        raise ValueError(f"no hardware called {name!r}{hint}; or name a .toml file of one table")
    return known[name]


def known_hardware() -> dict[str, Hardware]:
    """Return all accelerators that the package knows, by name."""
    return _by_name(shipped_table("planning/hardware.toml", dict[str, dict[str, Any]]))


@cache  # called for every step's metrics
def peak_flops(cuda_name: str) -> float | None:
    """Return the manufacturer's dense bf16 FLOP/s of the device with this CUDA name; None for an unknown device.

    The name must match exactly, since the PCIe card of a generation is slower than the one with NVLink.
    """
    return next((known.flops for known in known_hardware().values() if cuda_name in known.cuda_names), None)


def _by_name(tables: dict[str, Any]) -> dict[str, Hardware]:
    """Validate tables as accelerators with the names of the tables."""
    whole = TypeAdapter(dict[str, dict[str, Any]]).validate_python(tables)
    return TypeAdapter(dict[str, Hardware]).validate_python({n: {**table, "name": n} for n, table in whole.items()})
