"""The plugin of axolotl, with axolotl's own manager if it is installed, else with the interface of axolotl 0.19."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.integrations.models import SMALL, device, make
from xent.integrations import patch, trl

NAME = "xent.integrations.axolotl.XentPlugin"


class BasePlugin:
    """The hooks of axolotl 0.19 that the plugin has."""

    def post_model_load(self, cfg: Any, model: Any) -> None: ...

    def post_train_unload(self, cfg: Any) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the plugin as axolotl makes it."""
    if importlib.util.find_spec("axolotl"):
        from axolotl.integrations.base import PluginManager

        manager = PluginManager()
        manager.register(NAME)
        yield manager.plugins.pop(NAME)
    else:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
        module, _, kind = NAME.rpartition(".")
        yield getattr(importlib.import_module(module), kind)()
        del sys.modules[module]


def test_hooks_are_those_of_axolotl(plugin: Any) -> None:
    kind, base = type(plugin), type(plugin).__mro__[1]
    hooks = [name for name in vars(kind) if not name.startswith("_")]
    assert hooks == ["post_model_load", "post_train_unload"]
    for name in hooks:
        ours, theirs = (list(inspect.signature(getattr(one, name)).parameters) for one in (kind, base))
        assert ours == theirs


def test_patches_the_model(plugin: Any, fused: list[Any]) -> None:
    model, tokens = make("llama").train(), torch.arange(16, device=device).view(2, 8)
    expected = model(tokens, labels=tokens).loss
    plugin.post_model_load(SimpleNamespace(rl=None), model)
    torch.testing.assert_close(model(tokens, labels=tokens).loss, expected)
    assert len(fused) == 1
    assert not [name for place, name in patch._replaced if place.__name__.startswith("trl")]


def test_patches_trl_until_the_end_of_the_run(plugin: Any, monkeypatch: pytest.MonkeyPatch, fused: list[Any]) -> None:
    called: list[str] = []
    for name in ("patch", "unpatch"):
        monkeypatch.setattr(trl, name, lambda name=name: called.append(name))
    model, cfg = make("llama"), SimpleNamespace(rl="dpo")
    plugin.post_model_load(cfg, model)
    plugin.post_train_unload(cfg)
    assert called == ["patch", "unpatch"]


def test_patches_the_model_without_a_trl_that_xent_knows(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, fused: list[Any]
) -> None:
    def refuse() -> None:
        raise ImportError("it is written for another TRL")

    monkeypatch.setattr(trl, "patch", refuse)
    model, tokens = make("llama").train(), torch.arange(16, device=device).view(2, 8)
    with pytest.warns(RuntimeWarning, match=r"^it is written for another TRL. The model was patched$"):
        plugin.post_model_load(SimpleNamespace(rl="grpo"), model)
    model(tokens, labels=tokens)
    assert len(fused) == 1


def test_refuses_a_model_without_a_head(plugin: Any) -> None:
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match="head"):
        plugin.post_model_load(SimpleNamespace(rl=None), model)
