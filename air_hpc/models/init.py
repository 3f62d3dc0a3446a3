"""Initial weights: the same on any world size, mesh and order of building.

Each parameter is drawn by a generator of its own, seeded by (seed, parameter name), on the device
the parameter lives on. So a sharded parameter is drawn whole, cut, and the rest let go, without
one word between ranks, and the largest thing ever held is one whole parameter. The numbers are
equal on every world size; a CPU and a GPU draw different ones.

Matrices are normal with `init_std`, those that end in the residual stream (wo, w2, of experts too)
with init_std / sqrt(2 · layers) (GPT-2, section 2.3), norm weights are one, buffers what their
module says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from air_hpc.config.spec import ModelSpec
from air_hpc.models.decoder import Decoder
from air_hpc.models.local import local_part
from air_hpc.models.moe import MoeFeedForward

_RESIDUAL = (
    "attention.wo.weight",
    "feed_forward.w2.weight",
    "feed_forward.experts.w2",
    "feed_forward.shared.w2.weight",
)


def on_meta(
    model: ModelSpec,
    sequence_length: int,
    layers: Iterable[int] | None = None,
    *,
    first: bool = True,
    last: bool = True,
) -> Decoder:
    """The model, or a part of it (see `Decoder`), with shapes and no storage."""
    with torch.device("meta"):
        return Decoder(model, sequence_length, layers, first=first, last=last)


def seed_of(seed: int, *labels: str | int) -> int:
    """A 63-bit seed from a seed and labels; equal in every process and on every machine."""
    text = "\x1f".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initialize(model: nn.Module, spec: ModelSpec, seed: int, device: torch.device) -> None:
    """Give `model`, on meta or not, sharded or not, storage on `device` and its first weights."""
    if any(tensor.is_meta for tensor in model.parameters()):
        model.to_empty(device=device)
    else:
        model.to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = _values(name, parameter, spec, seed)
            if isinstance(parameter, DTensor):
                local_part(parameter).copy_(_cut(values, parameter))
            else:
                parameter.copy_(values)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.reset_table()
        elif isinstance(module, MoeFeedForward):
            module.reset_buffers()


def _values(name: str, parameter: Tensor, spec: ModelSpec, seed: int) -> Tensor:
    if parameter.dim() == 1:
        return torch.ones(parameter.shape, device=parameter.device, dtype=parameter.dtype)
    std = spec.init_std
    if name.endswith(_RESIDUAL):
        std /= (2 * spec.layers) ** 0.5
    generator = torch.Generator(parameter.device).manual_seed(seed_of(seed, "init", name))
    values = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
    return values.normal_(0.0, std, generator=generator).to(parameter.dtype)


def _cut(values: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part of `values`, cut in the order in which the parameter was.

    That is the order of the mesh's dimensions, but for what FSDP cuts after an inner dimension
    (tensor or expert parallelism) has: such a placement is strided, and its turn comes last.
    """
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return values.new_empty(0)
    placements = list(enumerate(parameter.placements))
    cuts = [(axis, p.dim) for axis, p in placements if isinstance(p, Shard)]
    cuts += [(axis, p.dim) for axis, p in placements if isinstance(p, _StridedShard)]
    for axis, dim in cuts:
        pieces = torch.chunk(values, mesh.size(axis), dim=dim)
        index = coordinate[axis]
        # Where there are fewer rows than ranks, the last ranks hold none.
        none = values.narrow(dim, 0, 0)
        values = pieces[index] if index < len(pieces) else none
    return values
