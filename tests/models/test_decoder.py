from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from air_hpc.config.compose import Composer
from air_hpc.config.spec import ModelSpec, MoeSpec, RopeScaling
from air_hpc.models import Decoder, initialize, on_meta
from air_hpc.models.decoder import next_token_loss
from air_hpc.models.rope import inverse_frequencies, rotate, rotation_table
from air_hpc.plan.flops import block_flops, flops_per_token, head_flops

SMALL = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)
SHARED = Composer()
DEEPSEEK_LIKE = ModelSpec(
    dim=64,
    heads=4,
    kv_heads=4,
    ffn_dim=192,
    moe=MoeSpec(
        experts=16,
        active_experts=3,
        shared_experts=2,
        expert_ffn_dim=24,
        dense_layers=1,
        score="sigmoid",
        balance="bias",
    ),
)


def model_of(name: str) -> ModelSpec:
    return SHARED.compose([f"model={name}"]).model


LLAMA_8B = model_of("llama_8b")
CPU = torch.device("cpu")


def build(spec: ModelSpec, seed: int = 0) -> Decoder:
    model = on_meta(spec, 16)
    initialize(model, spec, seed, CPU)
    return model


def test_llama_8b_has_the_published_number_of_parameters() -> None:
    assert sum(p.numel() for p in on_meta(LLAMA_8B, 128).parameters()) == 8_030_261_248


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_32b", 32_762_123_264),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("gemma2_2b", 2_614_341_888),
        ("gemma2_9b", 9_241_705_984),
        ("gemma2_27b", 27_227_128_320),
        ("mixtral_8x7b", 46_702_792_704),
        ("mixtral_8x22b", 140_620_634_112),
    ],
)
def test_a_published_model_is_built_with_its_number_of_parameters(
    name: str, parameters: int
) -> None:
    assert sum(p.numel() for p in on_meta(model_of(name), 128).parameters()) == parameters


@pytest.mark.parametrize(
    "name", ["llama_8b", "tiny", "qwen3_tiny", "gemma_tiny", "mixtral_tiny", "deepseek_like"]
)
def test_flops_counted_on_meta_are_those_of_the_full_attention_convention(name: str) -> None:
    tokens = 8192 if name == "llama_8b" else 96
    spec = DEEPSEEK_LIKE if name == "deepseek_like" else model_of(name)
    with FlopCounterMode(display=False) as counter:
        model = on_meta(spec, tokens)
        model(torch.zeros(1, tokens, dtype=torch.long, device="meta")).sum().backward()
    assert counter.get_total_flops() == flops_per_token(spec, tokens).palm * tokens


def test_forward_flops_on_meta_are_a_third_of_the_planned_ones_module_by_module() -> None:
    spec, tokens = DEEPSEEK_LIKE, 96
    with FlopCounterMode(display=False) as counter:
        on_meta(spec, tokens)(torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    counts = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    dense, mixed = (block_flops(spec, layer, tokens) for layer in (0, 1))
    planned = {
        "layers.0.feed_forward": dense.feed_forward,
        "layers.1.attention": mixed.projections + mixed.scores.palm,
        "layers.1.feed_forward.router": mixed.router,
        "layers.1.feed_forward.experts": mixed.experts,
        "layers.1.feed_forward.shared": mixed.shared_experts,
        "output": head_flops(spec),
    }
    for name, flops in planned.items():
        assert 3 * counts[f"Decoder.{name}"] == flops * tokens, name


def test_parameter_names_are_the_stable_ones() -> None:
    names = {name for name, _ in build(SMALL).named_parameters()}
    layer = {
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "attention_norm",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
        "ffn_norm",
    }
    expected = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    expected |= {f"layers.{n}.{part}.weight" for n in range(2) for part in layer}
    assert names == expected
    assert set(build(SMALL).state_dict()) == expected  # no buffer in a checkpoint


def test_a_tied_head_has_no_parameter_of_its_own_and_trains_the_embedding() -> None:
    model = build(replace(SMALL, tied_head=True))
    assert "output.weight" not in dict(model.named_parameters())
    model(torch.randint(64, (1, 8))).sum().backward()
    assert model.tok_embeddings.weight.grad is not None


def test_a_position_sees_no_later_token() -> None:
    model = build(SMALL)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = build(SMALL), build(SMALL), build(SMALL, seed=1)
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (a.dim() == 1), name
    deeper = dict(build(replace(SMALL, layers=3)).named_parameters())
    assert torch.equal(
        deeper["layers.0.attention.wq.weight"], first.layers["0"].attention.wq.weight
    )


def test_meta_and_direct_building_give_the_same_logits() -> None:
    direct = Decoder(SMALL, 16)
    initialize(direct, SMALL, 0, CPU)
    tokens = torch.arange(16).unsqueeze(0)
    assert torch.equal(direct(tokens), build(SMALL)(tokens))


def test_the_loss_of_an_untrained_model_is_near_uniform() -> None:
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    loss = next_token_loss(build(SMALL)(tokens[:, :-1]), tokens[:, 1:])
    assert abs(float(loss.detach()) - math.log(64)) < 0.1


def test_dropout_acts_in_training_only() -> None:
    model = build(replace(SMALL, dropout=0.5))
    tokens = torch.arange(16).unsqueeze(0)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    grouped = build(SMALL)
    full = Decoder(replace(SMALL, kv_heads=4), 16)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("wk.weight", "wv.weight")):
            heads = state[name].view(2, 8, 32)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    tokens = torch.arange(16).unsqueeze(0)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_rotation_depends_on_relative_positions_only() -> None:
    table = rotation_table(SMALL, 16, CPU)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator)
    turned_q = rotate(q.expand(1, 16, 1, 8), table)[0, :, 0]
    turned_k = rotate(k.expand(1, 16, 1, 8), table)[0, :, 0]
    scores = turned_q @ turned_k.T
    for distance in range(4):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert abs(float(scores[3, 0] - scores[0, 0])) > 1e-3


def test_llama_31_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(128, 500000.0, None)
    scaled = inverse_frequencies(128, 500000.0, RopeScaling())
    waves = 2 * math.pi / plain
    ratio = plain / scaled
    assert torch.allclose(ratio[waves < 8192 / 4], torch.tensor(1.0))
    assert torch.allclose(ratio[waves > 8192], torch.tensor(8.0))
    middle = ratio[(waves > 8192 / 4) & (waves < 8192)]
    assert len(middle)
    assert bool(((middle > 1) & (middle < 8)).all())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_rotation_keeps_the_dtype(precision: torch.dtype) -> None:
    x = torch.ones(1, 4, 2, 8, dtype=precision)
    assert rotate(x, rotation_table(SMALL, 16, CPU)).dtype == precision
