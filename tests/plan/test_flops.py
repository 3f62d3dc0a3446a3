"""Test vectors for Llama 3.1 8B, and what the conventions mean."""

from __future__ import annotations

import dataclasses

import pytest

from air_hpc.config.compose import Composer
from air_hpc.config.spec import ModelSpec
from air_hpc.plan.flops import count_parameters, flops_per_token

LLAMA_8B = Composer().compose(["model=llama_8b"]).model


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
