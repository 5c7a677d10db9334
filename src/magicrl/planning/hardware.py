"""Machines: memory, arithmetic, bandwidths and links of one accelerator, from the package's file or a user's."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

GIB = 2.0**30


class HardwareEntry(BaseModel):
    """A table of a hardware file, in the units that data sheets use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: float = Field(gt=0)
    """Memory of one accelerator, GiB."""
    bf16_tflops: float = Field(gt=0)
    """Dense bf16 arithmetic, 1e12 FLOP/s."""
    memory_tb_s: float = Field(gt=0)
    """Memory bandwidth, 1e12 bytes/s."""
    link_gb_s: float = Field(gt=0)
    """One direction inside a node, 1e9 bytes/s."""
    network_gb_s: float = Field(gt=0)
    """One direction between nodes, for each accelerator, 1e9 bytes/s."""
    gpus_per_node: int = Field(ge=1)
    usable: float = Field(default=0.92, gt=0, le=1)
    """Share of the memory that can be planned with."""
    runtime_gib: float = Field(default=3.0, ge=0)
    """Contexts, communication buffers and the allocator's gaps, GiB."""
    source: str = ""
    """Where the figures are from."""
    cuda_names: tuple[str, ...] = ()
    """What CUDA calls the accelerators that have this arithmetic rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator and its links, in base units.

    Attributes:
        name: as on the command line.
        memory: bytes.
        usable: share of ``memory`` that can be planned with.
        flops: dense bf16 FLOP/s.
        bandwidth: bytes/s of its memory.
        link: bytes/s, one direction, inside a node.
        network: bytes/s, one direction, between nodes.
        gpus_per_node: accelerators of a node.
        runtime: bytes of contexts, communication buffers and the allocator's gaps.
    """

    name: str
    memory: float
    usable: float
    flops: float
    bandwidth: float
    link: float
    network: float
    gpus_per_node: int
    runtime: float = 3.0 * GIB

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
    return {name: _hardware(name, entry) for name, entry in _parse(_package_file()).items()}


def peak_flops(cuda_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device that CUDA calls so, from its maker; None where the package does not know it.

    Only the exact name counts: the PCIe card of a generation is slower than the one with NVLink.
    """
    for entry in _parse(_package_file()).values():
        if cuda_name in entry.cuda_names:
            return entry.bf16_tflops * 1e12
    return None


def _package_file() -> str:
    return resources.files("magicrl.planning").joinpath("hardware.toml").read_text(encoding="utf-8")


def _from_file(path: Path) -> Hardware:
    try:
        found = {name: _hardware(name, entry) for name, entry in _parse(path.read_text(encoding="utf-8")).items()}
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: not a hardware file: {error}") from None
    if len(found) != 1:
        raise ValueError(f"{path}: must hold exactly one table, [name], but has {len(found)}")
    return next(iter(found.values()))


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
