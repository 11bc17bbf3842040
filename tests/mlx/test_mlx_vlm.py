"""Models of mlx-vlm, which take images and return an object that has the logits: the values of their own logits."""

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss

from tests.mlx.test_mlx_lm import BATCH, CONFIG, LENGTHS, V, make
from xent.integrations.mlx_lm import log_probs, loss

IMAGE = 90
"""The token of a patch of an image."""


def wrapped(model: nn.Module) -> nn.Module:
    """Return a model of mlx-lm that takes an image, and returns an object as mlx-vlm's do."""
    kind: Any = type(model)

    class OfVlm(kind):
        def __call__(self, input_ids: mx.array, pixel_values: mx.array | None = None, mask: Any = None) -> Any:
            shift = 0.0 if pixel_values is None else pixel_values.sum()
            embeddings = self.model.embed_tokens(input_ids) + shift
            return SimpleNamespace(logits=super().__call__(input_ids, input_embeddings=embeddings), hidden_states=None)

    model.__class__ = OfVlm
    return model


class Plain(nn.Module):
    """The same model, returning logits for one image."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self._inputs = model, inputs

    def __call__(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self.model(tokens, **self._inputs).logits
        return logits


def assert_same(model: nn.Module, batch: mx.array, lengths: mx.array, inputs: dict[str, Any]) -> None:
    """Compare loss, gradients and log-probabilities with those of the model's logits."""
    (value, count), gradients = nn.value_and_grad(model, loss)(model, batch, lengths, inputs=inputs)
    plain = Plain(model, inputs)
    (expected, expected_count), others = nn.value_and_grad(plain, default_loss)(plain, batch, lengths)
    assert count.item() == expected_count.item()
    np.testing.assert_allclose(value.item(), expected.item(), rtol=1e-5)
    ours, theirs = dict(tree_flatten(gradients)), dict(tree_flatten(others["model"]))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert mx.abs(ours[name] - gradient).max().item() <= 1e-5 * (mx.abs(gradient).max().item() + 1e-6), name
    log_p = nn.log_softmax(plain(batch[:, :-1]), axis=-1)
    picked = mx.take_along_axis(log_p, batch[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(np.array(log_probs(model, batch, inputs=inputs)), np.array(picked), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_object_with_logits(name: str) -> None:
    model = wrapped(make(name))
    assert_same(model, BATCH, LENGTHS, {"pixel_values": mx.full((2, 2), 0.01)})
    without = loss(model, BATCH, LENGTHS)[0].item()
    assert abs(loss(model, BATCH, LENGTHS, inputs={"pixel_values": mx.full((2, 2), 0.5)})[0].item() - without) > 1e-4


def test_embeddings_of_positions_are_not_the_head() -> None:
    """A layer with as many outputs as an image has positions is not taken for a head."""
    model = wrapped(make("llama"))
    model.vision_tower = nn.Embedding(64, 8)
    model.projector = nn.Linear(8, 64)
    names = [name for name, _ in importlib.import_module("xent.integrations.mlx_lm")._outside_layers(model)]
    assert "vision_tower" not in names
    np.testing.assert_allclose(loss(model, BATCH, LENGTHS)[0].item(), default_loss(Plain(model, {}), BATCH, LENGTHS)[0])


def test_llava() -> None:
    """A model of mlx-vlm itself."""
    module = pytest.importorskip("mlx_vlm.models.llava")
    text = {name: CONFIG[name] for name in CONFIG if name not in ("head_dim", "max_position_embeddings")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    mx.random.seed(2)
    model = module.Model(
        module.ModelConfig(
            text_config=module.TextConfig(model_type="llama", **text),
            vision_config=module.VisionConfig(model_type="clip_vision_model", image_size=28, **vision),
            model_type="llava",
            image_token_index=IMAGE,
            vocab_size=V,
        )
    )
    mx.eval(model.parameters())
    tokens = np.array(BATCH[:1] % IMAGE)
    tokens[0, 1:5] = IMAGE
    model.freeze()  # MLX 0.32.4 cannot differentiate the assignment of image features to embeddings
    model.language_model.model.layers[1].unfreeze()
    model.language_model.lm_head.unfreeze()
    images = mx.random.normal((1, 3, 28, 28))
    assert_same(model, mx.array(tokens), LENGTHS[:1] + mx.array([[4, 4]]), {"pixel_values": images, "mask": None})
