"""Checks of parallel degrees against what they cut: heads, layers, vocabulary, sequence, experts.

Each takes a RunSpec and yields Problems with the values on both sides and the nearest that work;
`plan.validity` says which keys each reads. Whether the degrees multiply to the world, and where ep
lies, is told where the mesh is resolved (`plan.mesh`), whether the batch suits them in `plan.make`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from air_hpc.config.spec import RunSpec
from air_hpc.errors import Problem
from air_hpc.plan.mesh import nearest_divisors
from air_hpc.plan.schedule import (
    SCHEDULES,
    SINGLE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    stages_per_rank,
)


def divides(
    key: str, degree: int, whole: int, name: str, nearest_of: int | None = None
) -> Iterable[Problem]:
    """A Problem unless `degree` divides `whole`; the nearest named divide `nearest_of` as well."""
    if whole % degree:
        yield Problem(
            key,
            str(degree),
            f"{key.rpartition('.')[2]} ({degree}) does not divide {name} ({whole})",
            f"a divisor of {whole}",
            f"Nearest that work: {nearest_divisors(nearest_of or whole, degree)}",
        )


def model_shape(spec: RunSpec) -> Iterable[Problem]:
    """Heads divide widths, and of experts there are as many as are used."""
    model = spec.model
    if model.head_dim is None:
        yield from divides("model.heads", model.heads, model.dim, "model.dim")
    yield from divides("model.kv_heads", model.kv_heads, model.heads, "model.heads")
    if model.head_dim is not None and model.head_dim % 2:
        message = f"a head of {model.head_dim}, and rotary embeddings turn pairs"
        yield Problem("model.head_dim", str(model.head_dim), message, "an even head width")
    elif model.head_dim is None and model.dim % model.heads == 0 and model.head_width % 2:
        yield Problem(
            "model.heads",
            str(model.heads),
            f"model.dim ({model.dim}) over model.heads ({model.heads}) is a head of"
            f" {model.head_width}, and rotary embeddings turn pairs",
            "an even head width",
        )
    if model.global_every is not None and model.sliding_window is None:
        message = "every layer sees all tokens where model.sliding_window is null"
        yield Problem("model.global_every", str(model.global_every), message, "null", warning=True)
    moe = model.moe
    if moe is None:
        return
    if moe.active_experts > moe.experts:
        message = f"more than model.moe.experts ({moe.experts})"
        active = str(moe.active_experts)
        yield Problem("model.moe.active_experts", active, message, f"1 to {moe.experts}")
    if moe.dense_layers >= model.layers:
        message = f"leaves none of model.layers ({model.layers}) with experts"
        dense = str(moe.dense_layers)
        yield Problem("model.moe.dense_layers", dense, message, f"below {model.layers}")


def tensor_degree(spec: RunSpec) -> Iterable[Problem]:
    """tp cuts heads, widths and the vocabulary, and between the blocks the sequence."""
    model, tp, cp = spec.model, spec.parallelism.tp, spec.parallelism.cp
    widths = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.vocab_size": model.vocab_size,
        "model.ffn_dim": model.ffn_dim,
    }
    moe = model.moe
    if moe is not None and moe.expert_ffn_dim is not None:
        widths["model.moe.expert_ffn_dim"] = moe.expert_ffn_dim
    tokens = spec.data.sequence_length
    if tokens % cp == 0:
        name = "data.sequence_length" if cp == 1 else "data.sequence_length over cp"
        widths[name] = tokens // cp
    common = math.gcd(*widths.values())
    for name, width in widths.items():
        yield from divides("parallelism.tp", tp, width, name, common)


def context_degree(spec: RunSpec) -> Iterable[Problem]:
    """cp cuts the sequence; Ulysses trades it for heads, ring gives each rank a head and a tail."""
    model, degrees, tokens = spec.model, spec.parallelism, spec.data.sequence_length
    cp, tp, method = degrees.cp, degrees.tp, degrees.cp_method
    yield from divides("parallelism.cp", cp, tokens, "data.sequence_length")
    if cp == 1:
        return
    if method == "ring":
        if tokens % cp == 0 and tokens % (2 * cp):
            message = (
                f"cp_method=ring gives each rank two of 2 · cp ({2 * cp}) pieces, which do not"
                f" divide data.sequence_length ({tokens})"
            )
            near = nearest_divisors(tokens // 2, cp) if tokens % 2 == 0 else "1"
            hint = f"Nearest that work: {near}, or parallelism.cp_method=ulysses"
            yield Problem("parallelism.cp", str(cp), message, "half of a divisor", hint)
        for name in ("attention_softcap", "sliding_window"):
            value = getattr(model, name)
            if value is not None:
                message = f"passes keys and values on and cannot do model.{name} ({value})"
                hint = f"Or use a model without {name}"
                yield Problem("parallelism.cp_method", "ring", message, "ulysses", hint)
    elif model.heads % tp == 0:
        over = "" if tp == 1 else f" over tp ({tp})"
        heads = model.heads // tp
        yield from divides(
            "parallelism.cp", cp, heads, f"model.heads{over}", math.gcd(heads, tokens)
        )


def pipeline_degree(spec: RunSpec) -> Iterable[Problem]:
    """pp cuts the layers into stages; what a schedule asks of them, and of the backward pass."""
    degrees, layers = spec.parallelism, spec.model.layers
    pp, schedule = degrees.pp, degrees.pp_schedule
    if pp == 1:
        return
    loops = stages_per_rank(degrees)
    wanted = 1 if schedule in SINGLE_STAGE else 2 if schedule in V_SHAPED else loops
    if loops != wanted:
        message = f"pp_schedule={schedule} has {wanted} on each rank"
        hint = "interleaved_1f1b, looped_bfs and interleaved_zero_bubble take any number"
        key = "parallelism.pp_stages_per_rank"
        yield Problem(key, str(loops), message, f"auto or {wanted}", hint)
    if pp > layers:
        message = f"pp ({pp}) is more stages than model.layers ({layers})"
        yield Problem("parallelism.pp", str(pp), message, f"at most {layers}")
    elif pp * wanted > layers:
        message = (
            f"pp ({pp}) × {wanted} stages on each rank of pp_schedule={schedule} is more than"
            f" model.layers ({layers})"
        )
        hint = "Or parallelism.pp_schedule=1f1b, with one stage on each"
        yield Problem("parallelism.pp", str(pp), message, f"at most {layers // wanted}", hint)
    if schedule in SPLIT_BACKWARD and degrees.recompute == "ops":
        message = (
            f"pp_schedule={schedule} goes over each block twice in the backward pass, and what is"
            " computed again by operation can be used once"
        )
        yield Problem("parallelism.recompute", "ops", message, "none, full")
    if schedule in SPLIT_BACKWARD and spec.train.compile:
        message = f"pp_schedule={schedule} splits the backward pass; a compiled one stays whole"
        others = ", ".join(name for name in SCHEDULES if name not in SPLIT_BACKWARD)
        hint = f"Or parallelism.pp_schedule: {others}"
        yield Problem("train.compile", "true", message, "false", hint)


def expert_degree(spec: RunSpec) -> Iterable[Problem]:
    """Where ep lies is the mesh's business (`plan.mesh`); here, what it cuts."""
    ep, moe = spec.parallelism.ep, spec.model.moe
    if ep == 1:
        return
    if moe is None:
        message = f"model={spec.model.name} has no experts to spread"
        hint = "Choose a model with experts (model=mixtral_tiny) or parallelism.ep=1"
        yield Problem("parallelism.ep", str(ep), message, "1", hint)
    else:
        yield from divides("parallelism.ep", ep, moe.experts, "model.moe.experts")


def tensor_in_node(spec: RunSpec) -> Iterable[Problem]:
    """A warning where a tensor-parallel group crosses nodes."""
    tp, devices = spec.parallelism.tp, spec.launch.devices_per_node
    if tp == 1 or devices % tp == 0:
        return
    message = (
        f"a tensor-parallel group of {tp} does not lie on one node (launch.devices_per_node"
        f" {devices}): each block waits for the network four times"
    )
    near = nearest_divisors(devices, tp)
    hint = f"Nearest that stay inside a node: {near}"
    yield Problem("parallelism.tp", str(tp), message, hint=hint, warning=True)


def recompute(spec: RunSpec) -> Iterable[Problem]:
    """A budget is the compiler's to keep."""
    if spec.parallelism.recompute == "budget" and not spec.train.compile:
        message = "it is torch.compile that keeps to a budget, and train.compile is false"
        allowed, hint = "none, full, ops", "Or set train.compile=true"
        yield Problem("parallelism.recompute", "budget", message, allowed, hint)
