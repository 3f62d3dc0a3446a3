"""A checkpoint from any mesh loads on any other, and training goes on as if nothing had been.

One model has it all: experts with a bias, a dense layer, a tied head, normalised heads. AdamW,
whose moments would tell; its eps is large, so that rounding decides no step's direction.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from air_hpc.checkpoint.state import put_back, share_of, training_state
from air_hpc.config.spec import ModelSpec, MoeSpec, OptimizerSpec
from air_hpc.parallel.engine import Engine
from air_hpc.parallel.options import EngineOptions
from air_hpc.parallel.world import World
from air_hpc.plan.types import Mesh
from air_hpc.train.optimizer import build_optimizer
from tests.parallel.training import GLOBAL_BATCH, TOKENS, Curve, batches, on_mesh, step
from tests.torch_ranks import DEADLINE_S, join_world, run_ranks

pytestmark = pytest.mark.torch

MODEL = ModelSpec(
    dim=32,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn_dim=64,
    vocab_size=64,
    qk_norm=True,
    tied_head=True,
    moe=MoeSpec(
        experts=4, shared_experts=1, dense_layers=1, balance="bias", balance_bias_rate=0.01
    ),
)
ADAMW = OptimizerSpec(lr=1e-2, eps=1e-4)
MESHES = {
    "1": Mesh(),
    "ddp2": Mesh(dp_replicate=2),
    "fsdp2": Mesh(dp_shard=2),
    "tp2": Mesh(tp=2),
    "pp2": Mesh(pp=2),
    "ep2": Mesh(dp_shard=2, ep=2),
    "fsdp4": Mesh(dp_shard=4),
    "hsdp2x2": Mesh(dp_replicate=2, dp_shard=2),
    "fsdp2xtp2": Mesh(dp_shard=2, tp=2),
    "pp2xfsdp2": Mesh(pp=2, dp_shard=2),
    "cp2xtp2": Mesh(cp=2, tp=2),
}
BEFORE, AFTER = 2, 2
BOUND = 2e-5
PAIR_S = 20.0
"""What one pair may take beside the start of its ranks."""

ALL = list(itertools.product(MESHES, MESHES))
_NAMES = list(MESHES)
# Each mesh twice on either side: a ring of all, and one that jumps.
CURATED = [
    (source, _NAMES[(index + jump) % len(_NAMES)])
    for jump in (1, 5)
    for index, source in enumerate(_NAMES)
]


def trained(world: World) -> tuple[Engine, torch.optim.Optimizer]:
    size = GLOBAL_BATCH // world.data_ranks // 2
    # A V-shaped schedule on two ranks: one has the embedding and its copy, the other neither.
    schedule = "zbv_zero_bubble" if world.world_size == 2 else "1f1b"
    options = EngineOptions(pp_schedule=schedule)  # type: ignore[arg-type]
    engine = Engine(MODEL, TOKENS, 0, world, options, 2, size)
    engine.settle(torch.zeros(1, TOKENS, dtype=torch.long))
    return engine, build_optimizer(engine.parameters(), ADAMW, world.device)


def save_on(rank: int, rendezvous: str, names: list[str], folder: str) -> None:
    """Train BEFORE steps on each mesh and save."""
    whole = join_world(rank, rendezvous, MESHES[names[0]])
    for name in names:
        world = on_mesh(whole, MESHES[name])
        engine, optimizer = trained(world)
        for batch in batches(MODEL)[:BEFORE]:
            step(engine, optimizer, batch)
        state = training_state(engine.parts, optimizer, rank, world.device)
        share = share_of(state, world.stage_rank, world.stage_ranks, engine.written_elsewhere())
        save(share, storage_writer=FileSystemWriter(Path(folder) / name))


def go_on(rank: int, rendezvous: str, pairs: list[tuple[str, str]], folder: str) -> list[Curve]:
    """Load what the first mesh of each pair saved on the second, and train on."""
    whole = join_world(rank, rendezvous, MESHES[pairs[0][1]])
    found = []
    for source, target in pairs:
        world = on_mesh(whole, MESHES[target])
        engine, optimizer = trained(world)
        state = training_state(engine.parts, optimizer, rank, world.device)
        state["random"] = {}
        load(state, storage_reader=FileSystemReader(Path(folder) / source))
        put_back(state, engine.parts, optimizer, rank)
        after = batches(MODEL)[BEFORE : BEFORE + AFTER]
        found.append([step(engine, optimizer, batch) for batch in after])
    return found


def undisturbed(rank: int, rendezvous: str) -> Curve:
    engine, optimizer = trained(join_world(rank, rendezvous, Mesh()))
    data = batches(MODEL)[: BEFORE + AFTER]
    return [step(engine, optimizer, batch) for batch in data][BEFORE:]


def gaps_of(pairs: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], float]:
    """The largest difference of a loss or gradient norm from a run that was never interrupted."""

    def by_size(names: list[str]) -> dict[int, list[str]]:
        sizes: dict[int, list[str]] = {}
        for name in names:
            sizes.setdefault(MESHES[name].world_size, []).append(name)
        return sizes

    for size, names in by_size(list(dict.fromkeys(s for s, _ in pairs))).items():
        run_ranks(size, save_on, names, str(folder))
    [wanted] = run_ranks(1, undisturbed)
    gaps = {}
    for size, names in by_size(list(dict.fromkeys(t for _, t in pairs))).items():
        chosen = [pair for pair in pairs if pair[1] in names]
        patience_s = DEADLINE_S + PAIR_S * len(chosen)
        [results, *others] = run_ranks(size, go_on, chosen, str(folder), deadline_s=patience_s)
        assert all(other == results for other in others)
        for pair, curve in zip(chosen, results, strict=True):
            flat = zip(itertools.chain(*curve), itertools.chain(*wanted), strict=True)
            gaps[pair] = max(abs(a - b) for a, b in flat)
    return gaps


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(CURATED, id="score"),
        pytest.param(ALL, id="all", marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_training_goes_on_with_equal_losses(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    gaps = gaps_of(pairs, tmp_path)
    assert gaps.keys() == set(pairs)
    assert {pair: gap for pair, gap in gaps.items() if not gap <= BOUND} == {}


def names_saved(rank: int, rendezvous: str, degrees: Mesh) -> tuple[set[str], set[str]]:
    """Parameters and optimizer state that this rank writes; kept by name."""
    world = join_world(rank, rendezvous, degrees)
    engine, optimizer = trained(world)
    state = training_state(engine.parts, optimizer, rank, world.device)
    share = share_of(state, world.stage_rank, world.stage_ranks, engine.written_elsewhere())
    return set(share["model"]), set(share["optimizer"])


def test_a_checkpoint_has_the_same_names_on_every_mesh_and_a_tied_head_once() -> None:
    [(model, moments)] = run_ranks(1, names_saved, Mesh())
    assert "tok_embeddings.weight" in model
    assert "state.tok_embeddings.weight.exp_avg" in moments
    first, second = run_ranks(2, names_saved, Mesh(pp=2))
    assert first[0] != set()
    assert first[0] | second[0] == model
    assert first[0] & second[0] == set()
    assert first[1] | second[1] == moments
    assert first[1] & second[1] == set()
