"""Test vectors for Llama 3.1 8B, and what the conventions mean."""

from __future__ import annotations

import dataclasses

import pytest

from air_hpc.config.compose import Composer
from air_hpc.config.spec import ModelSpec, MoeSpec
from air_hpc.plan.flops import (
    attended_tokens,
    block_flops,
    block_parameters,
    count_parameters,
    embedding_parameters,
    flops_per_token,
    head_flops,
    model_flops,
)

SHARED = Composer()


def model_of(name: str) -> ModelSpec:
    return SHARED.compose([f"model={name}"]).model


LLAMA_8B = model_of("llama_8b")
FAMILIES = ("tiny", "qwen3_tiny", "gemma_tiny", "mixtral_tiny")


def test_parameters_are_exact() -> None:
    counts = count_parameters(LLAMA_8B)
    assert counts.parameters == 8_030_261_248
    assert counts.matmul_parameters == 7_504_658_432


@pytest.mark.parametrize(
    ("sequence_length", "causal", "palm"),
    [
        (2_048, 46.64, 48.25),
        (8_192, 51.47, 57.91),
        (32_768, 70.80, 96.57),
        (131_072, 148.11, 251.19),
    ],
)
def test_gflop_per_token(sequence_length: int, causal: float, palm: float) -> None:
    flops = flops_per_token(LLAMA_8B, sequence_length)
    assert flops.causal / 1e9 == pytest.approx(causal, rel=1e-3)
    assert flops.palm / 1e9 == pytest.approx(palm, rel=1e-3)


@pytest.mark.parametrize(
    ("tflops", "tokens_per_second", "convention"),
    [(744, 14_451, "causal"), (711, 12_273, "palm")],
)
def test_published_throughputs_close_on_the_count(
    tflops: float, tokens_per_second: float, convention: str
) -> None:
    flops = getattr(flops_per_token(LLAMA_8B, 8_192), convention)
    assert tflops * 1e12 / tokens_per_second == pytest.approx(flops, rel=1e-3)


def test_torchtitans_run_has_two_mfus() -> None:
    flops = flops_per_token(LLAMA_8B, 8_192)
    assert 6_667 * flops.palm / 989e12 == pytest.approx(0.390, abs=5e-4)
    assert 6_667 * flops.causal / 989e12 == pytest.approx(0.347, abs=5e-4)


def test_a_tied_head_multiplies_but_is_counted_once_as_weights() -> None:
    tied = ModelSpec(tied_head=True)
    free = dataclasses.replace(tied, tied_head=False)
    assert count_parameters(tied).matmul_parameters == count_parameters(free).matmul_parameters
    embedding = tied.vocab_size * tied.dim
    assert count_parameters(free).parameters - count_parameters(tied).parameters == embedding
    assert flops_per_token(tied, 128) == flops_per_token(free, 128)


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("qwen3_0_6b", 596_049_920, 596_049_920),
        ("qwen3_8b", 8_190_735_360, 8_190_735_360),
        ("qwen3_32b", 32_762_123_264, 32_762_123_264),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("gemma2_2b", 2_614_341_888, 2_614_341_888),
        ("gemma2_9b", 9_241_705_984, 9_241_705_984),
        ("gemma2_27b", 27_227_128_320, 27_227_128_320),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("mixtral_8x22b", 140_620_634_112, 39_152_031_744),
    ],
)
def test_a_published_model_has_its_number_of_parameters(
    name: str, parameters: int, active: int
) -> None:
    counts = count_parameters(model_of(name))
    assert counts.parameters == parameters
    assert counts.active_parameters == active


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2_9b", "qwen3_30b_a3b"])
def test_blocks_and_ends_add_up_to_the_model(name: str) -> None:
    model = model_of(name)
    layers = range(model.layers)
    flops = flops_per_token(model, 4096)
    blocks = [block_flops(model, layer, 4096).total for layer in layers]
    assert sum(b.causal for b in blocks) + head_flops(model) == pytest.approx(flops.causal)
    assert sum(b.palm for b in blocks) + head_flops(model) == pytest.approx(flops.palm)
    ends = embedding_parameters(model) * (1 if model.tied_head else 2) + model.dim
    weights = sum(block_parameters(model, layer).total for layer in layers) + ends
    assert weights == count_parameters(model).parameters


def test_each_module_has_six_flops_for_each_weight_that_a_token_passes() -> None:
    moe = MoeSpec(experts=16, active_experts=2, shared_experts=1, expert_ffn_dim=8, dense_layers=1)
    model = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64, moe=moe)
    flops = model_flops(model, 128)
    assert flops.projections == 6 * 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert flops.feed_forward == 6 * 3 * 32 * 64, "the dense layer's alone"
    assert flops.router == 6 * 32 * 16
    assert flops.experts == 6 * 2 * 3 * 32 * 8
    assert flops.shared_experts == 6 * 3 * 32 * 8
    assert flops.head == 6 * 64 * 32
    assert flops.scores.palm == 2 * 12 * 32 * 128
    assert flops.scores.causal == flops.scores.palm / 2


def test_active_parameters_leave_the_idle_experts_out_and_matrix_products_do_not() -> None:
    model = model_of("mixtral_8x7b")
    expert = 3 * 4096 * 14336
    counts = count_parameters(model)
    assert counts.active_parameters is not None
    assert counts.parameters - counts.active_parameters == 32 * 6 * expert
    assert counts.matmul_parameters > counts.active_parameters
    block = block_parameters(model, 0)
    assert block.matmul - block.active_matmul == block.total - block.active == 6 * expert


@pytest.mark.parametrize("window", [1, 5, 63, 64, 100])
def test_a_window_counts_what_is_attended_to_but_half_of_its_edge(window: int) -> None:
    """T tokens see T (T + 1) / 2 pairs, which the causal convention calls T² / 2."""
    tokens = 64
    pairs = sum(min(position + 1, window) for position in range(tokens))
    edge = min(window, tokens) / 2
    assert attended_tokens(tokens, window) == (pairs - edge) / tokens
    assert attended_tokens(tokens, None) == tokens / 2


def test_a_sliding_window_saves_causal_flops_in_its_own_layers_only() -> None:
    model = model_of("gemma2_2b")
    local, everywhere = (block_flops(model, layer, 8192).scores for layer in (0, 1))
    assert local.causal / everywhere.causal == pytest.approx(2 * (4096 - 4096**2 / 16384) / 8192)
    assert local.palm == everywhere.palm
    short = [block_flops(model, layer, 4096).scores.causal for layer in (0, 1)]
    assert short[0] == short[1]
