"""mlx-lm's trainer with xent's loss: the values and gradients of default_loss, without its logits."""

import argparse
import functools
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, default_loss, evaluate, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.mlx.test_work import peak
from xent.integrations.mlx import classifier
from xent.integrations.mlx_lm import log_probs, loss

V = 96
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "rope_theta": 1e4,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 16.0},
    "cohere": {"logit_scale": 0.3, "layer_norm_eps": 1e-5},
    "granite": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
BATCH = mx.array(np.random.default_rng(0).integers(0, V, (3, 17)))
LENGTHS = mx.array([[1, 9], [3, 16], [0, 5]])


def make(name: str, **changes: Any) -> nn.Module:
    kind = name.partition(",")[0]
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(CONFIG | {"model_type": kind} | MODELS[name] | changes))
    mx.eval(model.parameters())
    return model


def assert_same(model: nn.Module, tolerance: float = 1e-5) -> None:
    (found, ntoks), gradients = nn.value_and_grad(model, loss)(model, BATCH, LENGTHS)
    (expected, expected_ntoks), expected_gradients = nn.value_and_grad(model, default_loss)(model, BATCH, LENGTHS)
    assert (ntoks.item(), ntoks.dtype) == (expected_ntoks.item(), expected_ntoks.dtype)
    assert found.dtype == mx.float32
    np.testing.assert_allclose(found.item(), expected.item(), rtol=tolerance)
    ours, theirs = dict(tree_flatten(gradients)), dict(tree_flatten(expected_gradients))
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        difference = mx.abs(ours[name].astype(mx.float32) - grad.astype(mx.float32)).max().item()
        assert difference <= tolerance * (mx.abs(grad).max().item() + 1e-7), name


@pytest.mark.parametrize("name", MODELS)
def test_equals_default_loss(name: str) -> None:
    model = make(name)
    before = mx.array(model(BATCH))
    assert_same(model)
    np.testing.assert_array_equal(model(BATCH), before)


def test_without_compile() -> None:
    """As with MLX_DISABLE_COMPILE=1, for debugging a model."""
    mx.disable_compile()
    try:
        assert_same(make("gemma2"))
        test_trained_scale_is_refused(compiled=False)
    finally:
        mx.enable_compile()


@pytest.mark.parametrize("name", MODELS)
def test_quantized_with_lora(name: str) -> None:
    model = make(name)
    nn.quantize(model, group_size=32, bits=8)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    assert tree_flatten(model.trainable_parameters())
    assert_same(model, 1e-4)


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_frozen_head(name: str) -> None:
    model = make(name)
    (model.lm_head if name == "llama" else model.model.embed_tokens).freeze()
    assert_same(model)


def plain_log_probs(model: nn.Module, temperature: float = 1.0) -> tuple[mx.array, mx.array]:
    """Return the log-probability of each token and the entropy, from the model's own logits."""
    log_p = nn.log_softmax(model(BATCH[:, :-1]).astype(mx.float32) / temperature, axis=-1)
    return mx.take_along_axis(log_p, BATCH[:, 1:, None], -1)[..., 0], -(mx.exp(log_p) * log_p).sum(-1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantized", [False, True])
def test_log_probs_equal_those_of_the_models_logits(name: str, quantized: bool) -> None:
    model = make(name)
    if quantized:
        nn.quantize(model, group_size=32, bits=8)
        model.freeze()
        linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    temperature = mx.full((3, 16), 0.7)

    def ours(model: nn.Module) -> tuple[mx.array, list[mx.array]]:
        found = log_probs(model, BATCH, temperature=temperature, entropy=True)
        return (found[0] * mx.arange(16) + 2 * found[1]).sum(), list(found)

    def theirs(model: nn.Module) -> tuple[mx.array, list[mx.array]]:
        found = plain_log_probs(model, 0.7)
        return (found[0] * mx.arange(16) + 2 * found[1]).sum(), list(found)

    (_, found), gradients = nn.value_and_grad(model, ours)(model)
    (_, expected), expected_gradients = nn.value_and_grad(model, theirs)(model)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5)
    made, truth = dict(tree_flatten(gradients)), dict(tree_flatten(expected_gradients))
    assert made.keys() == truth.keys()
    for key, grad in truth.items():
        assert mx.abs(made[key] - grad).max().item() <= 1e-4 * (mx.abs(grad).max().item() + 1e-7), key


def test_log_probs_of_unmasked_tokens() -> None:
    model = make("llama")
    found, expected = log_probs(model, BATCH, LENGTHS), plain_log_probs(model)[0]
    steps = np.arange(1, 17)
    counts = (steps >= np.array(LENGTHS)[:, :1]) & (steps <= np.array(LENGTHS)[:, 1:])
    np.testing.assert_allclose(np.array(found), np.where(counts, np.array(expected), 0), atol=1e-5)
    (value, ntoks) = loss(model, BATCH, LENGTHS)
    np.testing.assert_allclose(-found.sum().item() / ntoks.item(), value.item(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_log_probs_of_a_model_in_16_bits_come_from_float32_logits(dtype: mx.Dtype) -> None:
    model = make("llama")
    model.set_dtype(dtype)
    hidden, weight = model.model(BATCH[:, :-1]).astype(mx.float32), model.lm_head.weight.astype(mx.float32)
    log_p = nn.log_softmax(hidden @ weight.T, axis=-1)
    expected = mx.take_along_axis(log_p, BATCH[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(np.array(log_probs(model, BATCH)), np.array(expected), atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int16, mx.uint32], ids=str)
def test_tokens_of_any_integer_dtype(dtype: mx.Dtype) -> None:
    """Tokens that are not counted become -100, which not every dtype has."""
    model = make("llama", vocab_size=200)
    expected, _ = loss(model, BATCH, LENGTHS)
    found, ntoks = loss(model, BATCH.astype(dtype), LENGTHS)
    assert ntoks.item() == 28
    assert found.item() == expected.item()
    assert mx.array_equal(log_probs(model, BATCH.astype(dtype), LENGTHS), log_probs(model, BATCH, LENGTHS))


def test_nothing_to_count_is_zero() -> None:
    model = make("llama")
    (found, ntoks), gradients = nn.value_and_grad(model, loss)(model, BATCH, mx.array([[20, 30]] * 3))
    assert (found.item(), ntoks.item()) == (0.0, 0)
    assert not any(grad.any().item() for _, grad in tree_flatten(gradients))


def test_options_are_passed_on() -> None:
    model = make("llama")
    plain, smoothed = (call(model, BATCH, LENGTHS)[0].item() for call in (loss, functools.partial(loss, z_loss=0.1)))
    assert smoothed > plain


def test_logits_are_never_stored() -> None:
    """Also under the trainer's mx.compile. A frozen head has no gradient there."""
    model = make("llama", vocab_size=10_000)
    model.freeze()
    model.model.norm.unfreeze()
    batch, lengths = mx.zeros((4, 257), mx.int32), mx.array([[0, 256]] * 4)
    logits, head = 4 * 256 * 10_000 * 4, model.lm_head.weight.nbytes
    step = nn.value_and_grad(model, functools.partial(loss, workspace=2**19))
    compiled = mx.compile(lambda batch: step(model, batch, lengths), inputs=model.state, outputs=model.state)
    for run in (lambda: step(model, batch, lengths), lambda: compiled(batch)):
        assert peak(run) <= 0.25 * logits + 0.5 * head


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, 8)
        self.lm_head = nn.Linear(8, V)

    def __call__(self, tokens: mx.array) -> mx.array:
        return mx.square(self.lm_head(self.embed_tokens(tokens)))


class Scaling(nn.Module):
    """A model that trains the scale of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, 8)
        self.scale = mx.array(2.0)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.scale * self.embed_tokens.as_linear(self.embed_tokens(tokens))


@pytest.mark.parametrize("compiled", [False, True])
def test_trained_scale_is_refused(compiled: bool) -> None:
    """If it were treated as a number, it would get no gradient, and would stay constant in a compiled function."""
    model = Scaling()
    plain = functools.partial(loss, model)
    step = (
        mx.compile(plain, inputs=model.state) if compiled else functools.partial(nn.value_and_grad(model, loss), model)
    )
    with pytest.raises(ValueError, match="does more to its logits"):
        step(BATCH, LENGTHS)


def test_model_with_other_operations_on_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="does more to its logits than a scale and a softcap: use mlx_lm"):
        loss(Odd(), BATCH, LENGTHS)
    headless = Odd()
    headless.lm_head = nn.Sequential(nn.Conv1d(8, V, 1))
    with pytest.raises(ValueError, match="was called 0 times"):
        loss(headless, BATCH, LENGTHS)
    assert type(headless.embed_tokens) is nn.Embedding


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_head_with_lora_is_refused_until_it_is_fused(name: str) -> None:
    from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

    model = make(name)
    owner, key, kind = (
        (model, "lm_head", LoRALinear) if name == "llama" else (model.model, "embed_tokens", LoRAEmbedding)
    )
    owner[key] = kind.from_base(owner[key])
    message = (
        rf"LoRA wraps model\.(model\.)?{key}\..* fuse it first, with module\.fuse\(\).* use mlx_lm\.tuner\.trainer"
    )
    with pytest.raises(ValueError, match=message):
        loss(model, BATCH, LENGTHS)
    with pytest.raises(TypeError, match=rf"got {kind.__name__}: LoRA's part .* fuse it first"):
        classifier(owner[key])
    owner[key] = owner[key].fuse()
    assert_same(model)


class Curve(TrainingCallback):
    def __init__(self) -> None:
        self.losses = []

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self.losses.append(train_info["train_loss"])


def test_mlx_lm_trainer(tmp_path: Path) -> None:
    """A short fine-tuning run with mlx-lm's own trainer has the same losses as with default_loss.

    It uses SGD, because Adam divides a gradient by its size, so that the rounding of a gradient near 0 would decide the
    direction of a weight.
    """
    rng = np.random.default_rng(2)
    data = [([int(token) for token in (np.arange(20) * rng.integers(1, 4) + rng.integers(5)) % V], 0) for _ in range(8)]
    curves = []
    for chosen in (loss, default_loss):
        model, curve = make("llama"), Curve()
        nn.quantize(model, group_size=32, bits=8)
        model.freeze()
        linear_to_lora_layers(model, 2, {"rank": 8, "scale": 10.0, "dropout": 0.0})
        arguments = TrainingArgs(
            batch_size=4, iters=12, val_batches=1, steps_per_report=1, steps_per_eval=100, steps_per_save=1000,
            max_seq_length=64, adapter_file=str(tmp_path / "adapters.safetensors"),
        )  # fmt: skip
        np.random.seed(0)  # noqa: NPY002  what mlx-lm draws batches with
        train(model, optim.SGD(0.02), data, data, arguments, loss=chosen, training_callback=curve)
        curves.append([*curve.losses, evaluate(model, data, 4, 2, 64, loss=chosen)])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-5)
    assert curves[0][-1] < curves[0][0] - 0.2


class Tokens(list[Any]):
    """The data of mlx_lm.lora: rows that are processed on access."""

    def process(self, row: Any) -> Any:
        return row


def test_mlx_lm_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in docs/mlx.md: mlx_lm.lora calls train and evaluate by the names that are replaced there."""
    from mlx_lm import lora

    called = []

    def counted(*args: Any) -> Any:
        called.append(args)
        return loss(*args)

    for name in ("train", "evaluate"):
        monkeypatch.setattr(lora, name, functools.partial(getattr(lora, name), loss=counted))
    model, data = make("llama"), Tokens([(list(range(20)), 0)] * 4)
    changes = {"batch_size": 4, "iters": 2, "val_batches": 1, "num_layers": 2, "adapter_path": str(tmp_path)}
    arguments = argparse.Namespace(**lora.CONFIG_DEFAULTS | changes | {"test_batches": 1})
    lora.train_model(arguments, model, data, data)
    trained = len(called)
    lora.evaluate_model(arguments, model, data)
    assert (trained > 0, len(called) - trained) == (True, 1)
