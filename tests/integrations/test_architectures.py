"""Models whose operations between hidden states and loss differ from those in `models`."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from tests.integrations.models import (
    SMALL,
    TOKENS,
    VOCABULARY,
    batch,
    compare_under_autocast,
    device,
    gradients,
    read,
    spread_logits,
    worst_difference,
)
from xent.integrations.transformers import patch

_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}
_SEQ2SEQ = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_start_token_id": 0, **TOKENS}
_SEQ2SEQ |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_SEQ2SEQ |= {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip

FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "multiplied by a number": (
        "FalconH1ForCausalLM",
        {**SMALL, "head_dim": 8, "lm_head_multiplier": 3.0}
        | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4},
    ),
    "divided": ("GraniteMoeForCausalLM", {**SMALL, "logits_scaling": 0.125, "num_local_experts": 4}),
    "sinks and experts, with another loss added": (
        "GptOssForCausalLM",
        {**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "head called embed_out": ("GPTNeoXForCausalLM", SMALL),
    "head called output_projection": (
        "BioGptForCausalLM",
        {**SMALL, **_NO_BERT_DROPOUT, "activation_dropout": 0.0, "layerdrop": 0.0},
    ),
    "head called proj_out, no shift": ("WhisperForCausalLM", {**_SEQ2SEQ, "is_encoder_decoder": False}),
    "shifted by hand": ("OpenAIGPTDoubleHeadsModel", {**_GPT, **_NO_DROPOUT}),
    "tied and scaled in front": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, **TOKENS}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    **{
        f"a number for each class added: {name}": (f"{name}ForConditionalGeneration", _SEQ2SEQ)
        for name in ("Bart", "Blenderbot", "BlenderbotSmall", "MBart", "Mvp", "Pegasus", "PLBart")
    },
    "a number for each class added: Marian": ("MarianMTModel", {**_SEQ2SEQ, "decoder_vocab_size": VOCABULARY}),
    "a number for each class added: BigBirdPegasus": (
        "BigBirdPegasusForConditionalGeneration",
        {**_SEQ2SEQ, "attention_type": "original_full"},
    ),
    "a number for each class added: LED": ("LEDForConditionalGeneration", {**_SEQ2SEQ, "attention_window": 4}),
    "masked language model": ("RobertaForMaskedLM", {**SMALL, **_NO_BERT_DROPOUT}),
    "text inside of another model": (
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", **SMALL}, "image_token_index": 95}
        | {"vision_config": {"model_type": "clip_vision_model", **_VISION}},
    ),
    "softcap inside of another model": (
        "PaliGemmaForConditionalGeneration",
        {"text_config": {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.5, **SMALL}}
        | {"vision_config": {"model_type": "siglip_vision_model", **_VISION}}
        | {"image_token_index": 95, "projection_dim": 32, "hidden_size": 32},
    ),
}
"""Name of the special feature -> class and arguments of its configuration."""

COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "several predictions for each token": (
        "ProphetNetForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "max_position_embeddings": 64, **TOKENS}
        | {"num_decoder_layers": 1, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 48}
        | {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    ),
    "tokens left out in place": (
        "ChameleonForConditionalGeneration",
        {**SMALL, "vocabulary_map": {"<image>": 5, "IMGIMGBSZ": 6, "IMGIMGAAZ": 7}}
        | {"vq_config": {"embed_dim": 8, "num_embeddings": 4, "latent_channels": 8, "base_channels": 32}
           | {"channel_multiplier": [1], "num_res_blocks": 1, "resolution": 8}},
    ),
}  # fmt: skip
"""The same for models with operations on logits that cannot be recorded, so that the logits are computed."""


def make(kind: str, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**copy.deepcopy(arguments))).to(device)
    spread_logits(model)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model


@pytest.mark.parametrize("name", [*FUSED, *COMPUTED])
def test_step(name: str, fused: list[tuple[int, ...]]) -> None:
    model, inputs = make(*{**FUSED, **COMPUTED}[name]), batch()
    if name == "shifted by hand":
        inputs["mc_token_ids"] = inputs["input_ids"].new_zeros(2)
    if name == "softcap inside of another model":  # transformers 5.0 demands them
        inputs["token_type_ids"] = torch.ones_like(inputs["labels"])
    if name == "tokens left out in place":
        inputs["labels"] = inputs["labels"].where(inputs["labels"] != 6, 8).where(inputs["labels"] != 7, 8)
    plain, expected = gradients(model, inputs)
    with (
        patch(model),
        nullcontext() if name in FUSED else pytest.warns(RuntimeWarning, match="looked at them at .*py:"),
    ):
        patched, found = gradients(model, inputs)
    assert len(fused) == (name in FUSED)
    torch.testing.assert_close(patched.loss, plain.loss, rtol=1e-6, atol=0)
    assert worst_difference(found, expected) <= 1e-5
    assert torch.equal(read(patched.logits), plain.logits)


@pytest.mark.parametrize("name", ["MBart", "Marian"])
def test_offset_under_autocast(name: str, fused: list[tuple[int, ...]]) -> None:
    """The added constant is float32, so the logits become float32."""
    compare_under_autocast(make(*FUSED[f"a number for each class added: {name}"]), batch(), torch.float32)
    assert fused
