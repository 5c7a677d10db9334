"""Machines: memory, arithmetic, bandwidths and links of one accelerator, from the package's file or a user's."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

GIB = 2.0**30


class HardwareEntry(BaseModel):
    """A table of a hardware file, in the units that data sheets use; link and network count one direction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: PositiveFloat
    bf16_tflops: PositiveFloat  # dense
    memory_tb_s: PositiveFloat
    link_gb_s: PositiveFloat  # inside a node
    network_gb_s: PositiveFloat  # between nodes, for each accelerator
    gpus_per_node: PositiveInt
    usable: float = Field(default=0.92, gt=0, le=1)  # share of the memory that can be planned with
    runtime_gib: NonNegativeFloat = 3.0  # contexts, communication buffers and the allocator's gaps
    source: str = ""
    cuda_names: tuple[str, ...] = ()  # what CUDA calls the accelerators that have this arithmetic rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator and its links, in base units."""

    name: str  # as on the command line
    memory: float  # bytes
    usable: float  # share of ``memory`` that can be planned with
    flops: float  # dense bf16 FLOP/s
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s, one direction, inside a node
    network: float  # bytes/s, one direction, between nodes
    gpus_per_node: int  # accelerators of a node
    runtime: float = 3.0 * GIB  # bytes of contexts, communication buffers and the allocator's gaps

    @property
    def budget(self) -> float:
        """Bytes that can be planned with."""
        return self.memory * self.usable


def load_hardware(name: str) -> Hardware:
    """The accelerator called ``name``, or the only one of a TOML file of the same form.

    Raises:
        ValueError: no such name; the text lists the known ones. Or a file that does not hold one valid table.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return _from_file(path)
    known = known_hardware()
    if name not in known:
        begun = [key for key in known if name and key.lower().startswith(name.lower())]
        near = begun or difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}; or name a .toml file of one table"
        raise ValueError(f"no hardware called {name!r}; {hint}")
    return known[name]


def known_hardware() -> dict[str, Hardware]:
    """All accelerators that the package knows."""
    return {name: _hardware(name, entry) for name, entry in _package_entries().items()}


def peak_flops(cuda_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device that CUDA calls so, from its maker; None where the package does not know it.

    Only the exact name counts: the PCIe card of a generation is slower than the one with NVLink.
    """
    known = (entry.bf16_tflops * 1e12 for entry in _package_entries().values() if cuda_name in entry.cuda_names)
    return next(known, None)


def _package_entries() -> dict[str, HardwareEntry]:
    return _parse(resources.files("magicrl.planning").joinpath("hardware.toml").read_text(encoding="utf-8"))


def _from_file(path: Path) -> Hardware:
    try:
        found = _parse(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: not a hardware file: {error}") from None
    if len(found) != 1:
        raise ValueError(f"{path}: must hold exactly one table, [name], but has {len(found)}")
    return _hardware(*found.popitem())


def _parse(text: str) -> dict[str, HardwareEntry]:
    return TypeAdapter(dict[str, HardwareEntry]).validate_python(tomllib.loads(text))


def _hardware(name: str, entry: HardwareEntry) -> Hardware:
    return Hardware(
        name=name,
        memory=entry.memory_gib * GIB,
        usable=entry.usable,
        flops=entry.bf16_tflops * 1e12,
        bandwidth=entry.memory_tb_s * 1e12,
        link=entry.link_gb_s * 1e9,
        network=entry.network_gb_s * 1e9,
        gpus_per_node=entry.gpus_per_node,
        runtime=entry.runtime_gib * GIB,
    )
