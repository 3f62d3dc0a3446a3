"""The families compute what Hugging Face's implementations of them do.

Runs where `transformers` is installed beside the project (`pip install transformers`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from air_hpc.config.spec import ModelSpec, MoeSpec
from air_hpc.models import Decoder

transformers = pytest.importorskip(
    "transformers", reason="pip install transformers to compare the models with its own"
)
pytestmark = pytest.mark.full

SHAPE: dict[str, Any] = {
    "dim": 64,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 96,
    "vocab_size": 128,
    "head_dim": 32,
}
FAMILIES: dict[str, tuple[ModelSpec, str, dict[str, Any]]] = {
    "llama": (ModelSpec(**SHAPE, rope_theta=500000.0), "Llama", {"rms_norm_eps": 1e-5}),
    "qwen3": (
        ModelSpec(**SHAPE, qk_norm=True, norm_eps=1e-6, tied_head=True),
        "Qwen3",
        {"tie_word_embeddings": True},
    ),
    "gemma2": (
        ModelSpec(
            **SHAPE,
            norm_eps=1e-6,
            tied_head=True,
            activation="gelu",
            post_norms=True,
            scale_embedding=True,
            attention_scale=0.25,
            attention_softcap=5.0,
            logit_softcap=3.0,
            sliding_window=12,
            global_every=2,
        ),
        "Gemma2",
        {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 12,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (
        ModelSpec(**SHAPE, moe=MoeSpec(experts=8, active_experts=2)),
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        ModelSpec(
            **SHAPE,
            qk_norm=True,
            norm_eps=1e-6,
            moe=MoeSpec(experts=16, active_experts=4, expert_ffn_dim=48),
        ),
        "Qwen3Moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
}


def theirs(spec: ModelSpec, name: str, more: dict[str, Any]) -> Any:
    """A model of theirs with weights that leave no part of it idle."""
    config = getattr(transformers, f"{name}Config")(
        hidden_size=spec.dim,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_width,
        intermediate_size=spec.ffn_dim,
        vocab_size=spec.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        pad_token_id=None,
        **{"rms_norm_eps": spec.norm_eps, "tie_word_embeddings": False, **more},
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return model


def to_neighbours(x: Tensor, width: int) -> Tensor:
    """Rows of heads whose rotary pairs are two halves, with the pairs side by side."""
    heads = x.view(-1, 2, width // 2, *x.shape[1:])
    return heads.transpose(1, 2).reshape(x.shape)


def ours(spec: ModelSpec, model: Any) -> Decoder:
    """Our model with the weights of `model`."""
    state, width = model.state_dict(), spec.head_width
    # Gemma's norms multiply by one more than their weight.
    more = 1.0 if spec.post_norms else 0.0
    found = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"] + more,
    }
    if not spec.tied_head:
        found["output.weight"] = state["lm_head.weight"]
    norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if spec.post_norms:
        norms = {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        }
    for layer in range(spec.layers):
        here, there = f"layers.{layer}", f"model.layers.{layer}"
        for mine, its in norms.items():
            found[f"{here}.{mine}.weight"] = state[f"{there}.{its}.weight"] + more
        for letter in "qkvo":
            weight = state[f"{there}.self_attn.{letter}_proj.weight"]
            turned = to_neighbours(weight, width) if letter in "qk" else weight
            found[f"{here}.attention.w{letter}.weight"] = turned
        if spec.qk_norm:
            for letter in "qk":
                weight = state[f"{there}.self_attn.{letter}_norm.weight"]
                found[f"{here}.attention.{letter}_norm.weight"] = to_neighbours(weight, width)
        if spec.moe is None:
            for mine, its in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                weight = state[f"{there}.mlp.{its}_proj.weight"]
                found[f"{here}.feed_forward.{mine}.weight"] = weight
            continue
        found[f"{here}.feed_forward.router.weight"] = state[f"{there}.mlp.gate.weight"]
        gate, up = state[f"{there}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
        experts = {"w1": gate, "w2": state[f"{there}.mlp.experts.down_proj"], "w3": up}
        for mine, weight in experts.items():
            found[f"{here}.feed_forward.experts.{mine}"] = weight
    decoder = Decoder(spec, 48)
    decoder.load_state_dict(found)
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str) -> None:
    spec, name, more = FAMILIES[family]
    model = theirs(spec, name, more)
    tokens = torch.randint(128, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
        got = ours(spec, model)(tokens)
    assert wanted.std() > 0.1, "logits too small to tell"
    difference = float((got - wanted).abs().max())
    print(f"{family}: largest difference {difference:.2e}, logits up to {wanted.abs().max():.1f}")
    assert difference <= 1e-4
