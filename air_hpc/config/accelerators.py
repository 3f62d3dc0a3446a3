"""All accelerators that the config folders describe, for telling a reported device's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from air_hpc.config.build import build
from air_hpc.config.groups import ConfigFolders
from air_hpc.errors import BadInput, Problem, raise_if_any
from air_hpc.hardware.accelerator import AcceleratorSpec

_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    """YAML as Hydra reads it: `1e15` is a number, where YAML 1.1 wants a dot and a sign."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_accelerators(folders: ConfigFolders | None = None) -> tuple[AcceleratorSpec, ...]:
    """Every `accelerator/*.yaml`, by name; BadInput with all problems of all files."""
    folders = folders or ConfigFolders.find()
    found: list[AcceleratorSpec] = []
    problems: list[Problem] = []
    for name in folders.options("accelerator"):
        path = folders.file("accelerator", name)
        assert path is not None
        try:
            body = yaml.load(path.read_text(), Loader=_Loader)
        except (yaml.YAMLError, OSError, ValueError) as error:
            raise BadInput.single("accelerator", name, f"{path} cannot be read: {error}") from None
        if not isinstance(body, Mapping):
            raise BadInput.single("accelerator", name, f"{path} is no mapping")
        built = build(AcceleratorSpec, body)
        problems += built.problems
        if built.value is not None:
            found.append(built.value)
    raise_if_any(problems)
    return tuple(found)


def figures_wanted(name: str) -> str:
    """What to do about an accelerator that no file describes: the file to fill in, as YAML.

    A figure left null is unknown, and so is what depends on it; none is ever taken from another
    device.
    """
    unknown = (
        "memory_bytes",
        "memory_bandwidth_bytes_per_s",
        "scale_up_bytes_per_s",
        "scale_up_devices",
        "scale_out_bytes_per_s",
        "matmul_ceiling",
    )
    lines = [
        f"name: {name}",
        "kind: cuda  # or rocm, cpu, neuron, hpu",
        "device_names: []  # as the driver reports it, in small letters",
        "peak_flops: {}  # {bf16: <FLOP/s>, fp8: <FLOP/s>}, dense, of one device",
        "unsupported_precisions: []",
        *(f"{key}: null" for key in unknown),
        "source: where these figures are from",
    ]
    body = "".join(f"\n    {line}" for line in lines)
    return (
        f"For a device that is not listed, fill in its figures as ~/conf/accelerator/{name}.yaml"
        f" and add --config-dir ~/conf:{body}"
    )
