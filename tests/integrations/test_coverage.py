"""Every family of transformers with a linear head: patched training is fused or warns, and gives the same numbers."""

import copy
import dataclasses
import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.integrations.models import SMALL, TOKENS, batch, device
from xent.integrations.transformers import explain, patch

_BLOCKS = {f"{part}_{name}": count for part in ("encoder", "decoder")
           for name, count in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
_NAMES = {
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
    "attention_types": [[["global"], 2]],
    "attention_type": "original_full",
    "embedding_size": 16,
    "is_decoder": True,
}
"""The configuration names of the sizes of a tiny model; each configuration uses those that it has."""

CAUSAL = [
    "Apertus", "Arcee", "BioGpt", "Bitnet", "Bloom", "Cohere", "Cohere2", "Cwm", "DeepseekV2", "DeepseekV3",
    "DiffLlama", "Doge", "Ernie4_5", "Ernie4_5_Moe", "Exaone4", "Falcon", "FalconMamba", "FlexOlmo", "Gemma",
    "Gemma2", "Gemma3", "Glm", "Glm4", "Glm4Moe", "GPTBigCode", "GPTNeo", "GPTNeoX", "GptOss", "Granite",
    "GraniteMoe", "GraniteMoeShared", "Helium", "HunYuanDenseV1", "JetMoe", "Lfm2", "Llama", "Mamba", "MiniMax",
    "Ministral", "Mistral", "Mixtral", "ModernBertDecoder", "Mpt", "Nemotron", "Olmo", "Olmo2", "Olmo3", "Olmoe",
    "OPT", "Persimmon", "Phi", "Phi3", "Phimoe", "ProphetNet", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss",
    "SmolLM3", "StableLm", "Starcoder2", "VaultGemma", "XGLM"
]  # fmt: skip
MASKED = [
    "Albert", "Bert", "Camembert", "ConvBert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "Esm",
    "MobileBert", "ModernBert", "MPNet", "Nystromformer", "RemBert", "Roberta", "RoFormer",
    "XLMRoberta", "Yoso"
]  # fmt: skip
SEQ2SEQ = [
    "Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "LED", "M2M100", "MBart", "MT5", "Mvp", "Pegasus",
    "PegasusX", "PLBart", "ProphetNet", "T5", "UMT5"
]  # fmt: skip

NOT_FUSED = {
    "ProphetNetForCausalLM": "looked at them at",
    "ProphetNetForConditionalGeneration": "looked at them at",
    "MobileBertForMaskedLM": "its head was not called",
}
"""Models whose training warns -> part of the warning."""

CLASSES = [
    *[f"{name}ForCausalLM" for name in CAUSAL],
    *[f"{name}ForMaskedLM" for name in MASKED],
    *[f"{name}ForConditionalGeneration" for name in SEQ2SEQ],
    *("GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "CTRLLMHeadModel", "BertLMHeadModel", "MarianMTModel"),
]
PRESENT = [name for name in CLASSES if hasattr(transformers, name)]


def make(name: str) -> Any:
    """Return a tiny model without dropout."""
    kind = getattr(transformers, name)
    config = kind.config_class
    known = set(inspect.signature(config.__init__).parameters) | set(getattr(config, "attribute_map", {}))
    if dataclasses.is_dataclass(config):
        known |= {field.name for field in dataclasses.fields(config)}
    arguments = TOKENS | {key: copy.deepcopy(value) for key, value in _NAMES.items() if key in known}
    made = config(**arguments)
    made.decoder_start_token_id = 0
    torch.manual_seed(0)
    model = kind(made).to(device)
    assert sum(weight.numel() for weight in model.parameters()) < 3e6
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_number_of_supported_families() -> None:
    assert len(PRESENT) >= 60


@pytest.mark.parametrize("name", PRESENT)
def test_training(name: str, fused: list[tuple[int, ...]]) -> None:
    model, inputs = make(name).eval(), batch(masked=False)
    plain = model(**inputs).loss
    patch(model)
    assert model.get_output_embeddings().training is False
    model.get_output_embeddings().train()  # only the head, so that dropout is off
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = model(**inputs).loss
        loss.backward()
        torch.optim.SGD(model.parameters()).step()
    said = [str(warning.message) for warning in caught if "as without xent" in str(warning.message)]
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    if name in NOT_FUSED:
        assert len(said) == 1
        assert NOT_FUSED[name] in said[0]
        assert NOT_FUSED[name] in explain(model)
    else:
        assert fused
        assert not said
        assert "Training: fused." in explain(model)
