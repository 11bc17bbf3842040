"""Advice for a model whose head cannot be patched: which function of xent computes its loss."""

from typing import Any

__all__ = ["advice"]

_PLAIN = "xent.cross_entropy(outputs.logits, labels), which shifts nothing"

_FITS = {
    "ForMaskedLM": _PLAIN,
    "ForTokenClassification": _PLAIN,
    "ForSequenceClassification": _PLAIN,
    "ForImageClassification": _PLAIN,
    "ForVideoClassification": _PLAIN,
    "ForAudioClassification": _PLAIN,
    "ForSemanticSegmentation": "xent.cross_entropy(logits, labels, axis=1) of logits in the size of the labels",
    "ForQuestionAnswering": "xent.cross_entropy(outputs.start_logits, start_positions), and the same of the end",
}
"""The `loss_type` of a transformers model -> the call that computes its loss."""


def advice(model: Any) -> str:
    """Return one or two sentences that name the function to use for this model."""
    head, kind = model.get_output_embeddings(), getattr(model, "loss_type", None)
    if kind in _FITS:
        few = " Where classes are few, little memory is saved." if head is None else ""
        return f"What fits its logits is {_FITS[kind]}.{few}"
    if kind in ("ForCausalLM", "ForConditionalGeneration") and not model.config.is_encoder_decoder:
        return (
            "With model.loss_function = xent.integrations.transformers.causal_lm_loss it still does without the "
            "float32 copies of its logits"
        )
    if head is None:
        return (
            "It has no language-model head: load the class that has one (transformers.AutoModelForCausalLM, "
            "AutoModelForMaskedLM, AutoModelForSeq2SeqLM), or call "
            "xent.linear_cross_entropy(outputs.last_hidden_state, "
            "classifier.weight, labels), with shift=1 for a causal model"
        )
    return f"What fits its logits is {_PLAIN}."
