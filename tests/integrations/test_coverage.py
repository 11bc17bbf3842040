"""Every family of transformers with a linear head: patched training is fused or warns, and gives the same numbers.

Softcaps, scales and numbers that are added are strong, so that a missing one is noticed.
"""

import copy
import dataclasses
import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.integrations.models import (
    SMALL,
    TOKENS,
    batch,
    compare_under_autocast,
    device,
    gradients,
    read,
    spread_logits,
    worst_difference,
)
from xent.integrations.transformers import explain, patch

_BLOCKS = {f"{part}_{name}": count for part in ("encoder", "decoder")
           for name, count in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
_SIZES = {
    **SMALL,
    **_BLOCKS,
    **dict.fromkeys(["d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers"], 1),
    **dict.fromkeys(["n_head", "n_heads", "num_heads", "num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads", "attention_window"], 4),
    **dict.fromkeys(["ffn_dim", "d_ff", "hidden_dim", "n_inner", "ffn_hidden_size"], 48),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim"], 8),
    **dict.fromkeys(["n_group", "topk_group"], 1),
    **dict.fromkeys(["num_experts_per_tok", "num_layers", "type_vocab_size"], 2),
    **dict.fromkeys(["n_positions", "n_ctx"], 64),
    **dict.fromkeys(["decoder_start_token_id", "pad_index"], 0),
    **dict.fromkeys(["state_size", "qk_rope_head_dim", "qk_nope_head_dim"], 4),
    **dict.fromkeys(["mamba_n_heads", "mamba_d_head"], 8),
    **dict.fromkeys(["final_logit_softcapping", "logits_soft_cap"], 0.5),
    "logit_scale": 4.0,
    "logits_scaling": 0.125,
    "lm_head_multiplier": 3.0,
    "z_loss_coefficient": 0.01,
    "lru_width": 32,
    "mamba_d_ssm": 64,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "attention_types": [[["global"], 2]],
    "attention_type": "original_full",
    "embedding_size": 16,
    "is_decoder": True,
}
"""The settings of a tiny model; each configuration uses those that it has."""

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"num_hidden_layers": 1, "attn_layer_indices": [0]},
    "BartForCausalLM": {"is_encoder_decoder": False},
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {"<image>": 5, "IMGIMGBSZ": 6, "IMGIMGAAZ": 7},
        "vq_config": {"embed_dim": 8, "num_embeddings": 4, "latent_channels": 8, "base_channels": 32}
        | {"channel_multiplier": [1], "num_res_blocks": 1, "resolution": 8},
    },
    "GptOssForCausalLM": {"output_router_logits": True},  # another loss is added
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama", **SMALL},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_index": 95,
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.5, **SMALL},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": 95,
        "projection_dim": 32,
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "WhisperForCausalLM": {"is_encoder_decoder": False},
}
"""Further settings of some models."""

CAUSAL = [
    "Apertus", "Arcee", "Bamba", "Bart", "BioGpt", "Bitnet", "Bloom", "Cohere", "Cohere2", "Cwm", "DeepseekV2",
    "DeepseekV3", "DiffLlama", "Doge", "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "Falcon", "FalconH1", "FalconMamba",
    "FlexOlmo", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Glm4Moe", "GPTBigCode", "GPTNeo", "GPTNeoX", "GptOss",
    "Granite", "GraniteMoe", "GraniteMoeShared", "Helium", "HunYuanDenseV1", "JetMoe", "Lfm2", "Llama", "Mamba",
    "MiniMax", "Ministral", "Mistral", "Mixtral", "ModernBertDecoder", "Mpt", "Nemotron", "Olmo", "Olmo2", "Olmo3",
    "Olmoe", "OPT", "Persimmon", "Phi", "Phi3", "Phimoe", "ProphetNet", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe",
    "RecurrentGemma", "SeedOss", "SmolLM3", "StableLm", "Starcoder2", "VaultGemma", "Whisper", "XGLM"
]  # fmt: skip
MASKED = [
    "Albert", "Bert", "Camembert", "ConvBert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "Esm",
    "MobileBert", "ModernBert", "MPNet", "Nystromformer", "RemBert", "Roberta", "RoFormer",
    "XLMRoberta", "Yoso"
]  # fmt: skip
SEQ2SEQ = [
    "Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "Chameleon", "LED", "Llava", "M2M100", "MBart", "MT5",
    "Mvp", "PaliGemma", "Pegasus", "PegasusX", "PLBart", "ProphetNet", "T5", "UMT5"
]  # fmt: skip

NOT_FUSED = {
    "ProphetNetForCausalLM": "looked at them at",
    "ProphetNetForConditionalGeneration": "looked at them at",
    "ChameleonForConditionalGeneration": "looked at them at",  # it leaves tokens out in place
    "MobileBertForMaskedLM": "its head was not called",
}
"""Models whose training warns -> part of the warning."""

ROUNDED = ("DiffLlamaForCausalLM", "DogeForCausalLM")
"""Models whose attention amplifies rounding errors: gradients are compared with those in float64."""

CLASSES = [
    *[f"{name}ForCausalLM" for name in CAUSAL],
    *[f"{name}ForMaskedLM" for name in MASKED],
    *[f"{name}ForConditionalGeneration" for name in SEQ2SEQ],
    *("GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "CTRLLMHeadModel", "BertLMHeadModel", "MarianMTModel"),
    "OpenAIGPTDoubleHeadsModel",
]
PRESENT = [name for name in CLASSES if hasattr(transformers, name)]


def make(name: str) -> Any:
    """Return a tiny model without dropout, whose head alone is in training."""
    kind = getattr(transformers, name)
    config = kind.config_class
    known = set(inspect.signature(config.__init__).parameters) | set(getattr(config, "attribute_map", {}))
    if dataclasses.is_dataclass(config):
        known |= {field.name for field in dataclasses.fields(config)}
    arguments = TOKENS | {key: value for key, value in _SIZES.items() if key in known} | SPECIAL.get(name, {})
    configured = config(**copy.deepcopy(arguments))
    configured.decoder_start_token_id = 0
    torch.manual_seed(0)
    model = kind(configured).to(device).eval()
    assert sum(weight.numel() for weight in model.parameters()) < 3e6
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    spread_logits(model)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    model.get_output_embeddings().train()
    return model


def inputs_of(name: str) -> dict[str, Any]:
    inputs = batch()
    if name == "OpenAIGPTDoubleHeadsModel":
        inputs["mc_token_ids"] = inputs["input_ids"].new_zeros(2)
    if name == "PaliGemmaForConditionalGeneration":  # transformers 5.0 demands them
        inputs["token_type_ids"] = torch.ones_like(inputs["labels"])
    if name == "ChameleonForConditionalGeneration":  # tokens of images
        inputs["labels"] = inputs["labels"].where(inputs["labels"] != 6, 8).where(inputs["labels"] != 7, 8)
    return inputs


def test_number_of_supported_families() -> None:
    assert len(PRESENT) >= 60


@pytest.mark.parametrize("name", PRESENT)
def test_training(name: str, fused: list[tuple[int, ...]]) -> None:
    model, inputs = make(name), inputs_of(name)
    plain, expected = gradients(model, inputs)
    exact = gradients(copy.deepcopy(model).double(), inputs)[1] if name in ROUNDED else None
    patch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patched, found = gradients(model, inputs)
        logits = read(patched.logits) + 0
        torch.optim.SGD(model.parameters()).step()
    torch.testing.assert_close(patched.loss, plain.loss, rtol=1e-6, atol=0)
    if exact is None:
        assert worst_difference(found, expected) <= 1e-5
    else:
        assert worst_difference(found, exact) <= 2 * worst_difference(expected, exact)
    assert torch.equal(logits, plain.logits)
    said = [str(warning.message) for warning in caught if "as without xent" in str(warning.message)]
    if name in NOT_FUSED:
        assert len(said) == 1
        assert NOT_FUSED[name] in said[0]
        assert NOT_FUSED[name] in explain(model)
    else:
        assert len(fused) == 1
        assert not said
        assert "Training: fused." in explain(model)


@pytest.mark.parametrize("name", ["MBartForConditionalGeneration", "MarianMTModel"])
def test_offset_under_autocast(name: str, fused: list[tuple[int, ...]]) -> None:
    """The added constant is float32, so the logits become float32."""
    compare_under_autocast(make(name), batch(), torch.float32)
    assert fused
