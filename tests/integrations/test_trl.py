"""TRL's trainers take the same steps patched as with TRL's own kernels."""

import re
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl.trainer.distillation_trainer as distillation_trainer
import trl.trainer.utils as trainer_utils
from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Theirs

from tests.integrations.conftest import shapes_of
from tests.integrations.trl_training import TRAINERS, Run, make_model, train
from xent.integrations.transformers import explain
from xent.integrations.transformers import patch as patch_model
from xent.integrations.trl import (
    ChunkedDivergenceFunction,
    ChunkedLogProbFunction,
    patch,
    selective_log_softmax_and_entropy,
    unpatch,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),  # caused by TRL's use of transformers
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def plain_trl() -> Any:
    yield
    unpatch()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list of the shapes of hidden states from which log-probabilities or divergences are computed."""
    return shapes_of(monkeypatch, "linear_log_probs", "linear_divergence")


def assert_same_run(ours: Run, theirs: Run, steps: int = 3, error: float = 1e-5) -> None:
    assert len(ours.gradients) == len(theirs.gradients) == len(ours.weights) == steps
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert mine == pytest.approx(other, rel=20 * error, abs=2 * error)
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=10 * error, atol=error)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=10 * error, atol=error)


KINDS = [(name, "llama") for name in TRAINERS]
KINDS += [(name, kind) for name in ("sft", "distillation") for kind in ("gemma2", "granite", "phi")]
"""The trainers of log-probabilities pass a softcap, a scale and a bias alike."""


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_trainers_take_the_same_steps(name: str, kind: str, tmp_path: Path, calls: list[tuple[int, ...]]) -> None:
    theirs, _ = train(name, make_model(kind), tmp_path / "theirs")
    assert not calls
    with patch():
        ours, _ = train(name, make_model(kind), tmp_path / "ours")
    assert calls
    assert_same_run(ours, theirs)


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "entropy bonus": ("grpo", {"entropy_coef": 0.1}),
    "entropy quantile": ("grpo", {"top_entropy_quantile": 0.5}),
    "head in float32": ("grpo", {"cast_lm_head_to_fp32": True}),
    "weighting": ("dpo", {"use_weighting": True}),
    "preference losses": ("dpo", {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]}),
    "probabilities in the loss": ("sft", {"loss_type": "dft"}),
    "accumulation": ("sft", {"gradient_accumulation_steps": 2}),
    "forward divergence": ("distillation", {"beta": 0.0}),
    "reverse divergence": ("distillation", {"beta": 1.0}),
    "AdamW": ("dpo", {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-2}),
}


@pytest.mark.parametrize("case", MORE)
def test_options_of_trainers(case: str, tmp_path: Path, calls: list[tuple[int, ...]]) -> None:
    name, settings = MORE[case]
    theirs, _ = train(name, make_model(), tmp_path / "theirs", **settings)
    with patch():
        ours, _ = train(name, make_model(), tmp_path / "ours", **settings)
    assert calls
    assert_same_run(ours, theirs)


def test_lora(tmp_path: Path, calls: list[tuple[int, ...]]) -> None:
    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(5)
        return peft.get_peft_model(make_model(), config)

    theirs, _ = train("dpo", adapted(), tmp_path / "theirs")
    with patch():
        ours, _ = train("dpo", adapted(), tmp_path / "ours")
    assert calls
    assert_same_run(ours, theirs)


def test_mixed_precision(tmp_path: Path, calls: list[tuple[int, ...]]) -> None:
    """Under autocast TRL rounds logits to bfloat16, and xent does not."""
    exact, _ = train("sft", make_model(), tmp_path / "exact", steps=1)
    model = make_model()
    with patch():
        ours, _ = train("sft", model, tmp_path / "ours", steps=1, bf16=True)
        assert "xent computes log-probabilities" in explain(model)
    assert calls
    assert ours.logs[0]["loss"] == pytest.approx(exact.logs[0]["loss"], rel=1e-2)


def test_evaluation(tmp_path: Path) -> None:
    _, trainer = train("sft", make_model(), tmp_path)
    theirs = trainer.evaluate()
    with patch():  # a trainer that was created before
        ours = trainer.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_label_smoothing_of_a_patched_model(
    tmp_path: Path, calls: list[tuple[int, ...]], fused: list[tuple[int, ...]]
) -> None:
    """The Trainer's label smoothing needs logits, which the patched model defers."""
    settings = {"label_smoothing_factor": 0.1}
    theirs, _ = train("sft", make_model(), tmp_path / "theirs", **settings)
    assert not fused
    model = make_model()
    patch_model(model)
    with patch():
        ours, _ = train("sft", model, tmp_path / "ours", **settings)
    assert len(fused) == 3
    assert calls
    assert_same_run(ours, theirs)
    assert "Training: fused." in explain(model)


class TestExplain:
    def test_model_that_is_not_patched(self, tmp_path: Path) -> None:
        model = make_model()
        train("sft", model, tmp_path, steps=1)
        assert explain(model) == (
            "LlamaForCausalLM is not patched. Its forward is TRL's: where TRL's trainers call it with "
            "fused_lm_head=True, kernels of TRL's compute log-probabilities from hidden states, until you call "
            "xent.integrations.trl.patch()."
        )
        with patch():
            assert explain(model).endswith("xent computes log-probabilities from hidden states, without logits.")

    def test_patched_model_with_kernels_of_trl(self, tmp_path: Path) -> None:
        model = make_model()
        patch_model(model)
        message = re.escape(
            "training this LlamaForCausalLM is not using xent: its forward is TRL's, which computes log-probabilities "
            "with TRL's kernels until you call xent.integrations.trl.patch(). "
        )
        with pytest.warns(RuntimeWarning, match=message):
            train("sft", model, tmp_path)
        assert explain(model).splitlines()[1:] == [
            "Its forward is TRL's: where TRL's trainers call it with fused_lm_head=True, kernels of TRL's compute "
            "log-probabilities from hidden states, until you call xent.integrations.trl.patch()."
        ]

    @pytest.mark.parametrize("adapter", [False, True])
    def test_both_patched(self, adapter: bool, tmp_path: Path) -> None:
        """There is no warning."""
        model = make_model()
        if adapter:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        patch_model(model)
        with patch():
            train("dpo", model, tmp_path)
            assert explain(model).splitlines()[1:] == [
                "Its forward is TRL's: where TRL's trainers call it with fused_lm_head=True, xent computes "
                "log-probabilities from hidden states, without logits."
            ]


class TestPatch:
    def test_patch_is_undone_exactly(self) -> None:
        modules = trainer_utils, distillation_trainer
        before = [dict(vars(module)) for module in modules]
        assert trainer_utils._ChunkedLogProbFunction is Theirs
        patch()
        assert trainer_utils._ChunkedLogProbFunction is ChunkedLogProbFunction
        assert distillation_trainer.ChunkedDivergenceFunction is ChunkedDivergenceFunction
        for _ in range(2):
            unpatch()
            assert [dict(vars(module)) for module in modules] == before

    def test_nested(self) -> None:
        with patch():
            with patch():
                pass
            assert trainer_utils._ChunkedLogProbFunction is ChunkedLogProbFunction
        assert trainer_utils._ChunkedLogProbFunction is Theirs

    def test_later_patches_of_others_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = types.SimpleNamespace(apply=Theirs.apply)
        monkeypatch.setattr(trainer_utils, "_ChunkedLogProbFunction", Theirs)  # monkeypatch restores this at the end
        with patch():
            trainer_utils._ChunkedLogProbFunction = other
        assert trainer_utils._ChunkedLogProbFunction is other

    def test_missing_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(trainer_utils, "_ChunkedLogProbFunction")
        before = dict(vars(trainer_utils))
        message = r"looked for _ChunkedLogProbFunction in trl\.trainer\.utils of TRL 1\.\S+, and it has no such name"
        with pytest.raises(ImportError, match=message):
            patch()
        assert dict(vars(trainer_utils)) == before

    def test_other_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Later(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any) -> Any:
                return hidden

        monkeypatch.setattr(trainer_utils, "_ChunkedLogProbFunction", Later)
        with pytest.raises(ImportError, match=r"it takes \(hidden, weight, bias, targets\) there, where xent takes"):
            patch()
        assert trainer_utils._ChunkedLogProbFunction is Later

    def test_logits_on_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With Triton, TRL's functions of logits on GPUs use xent's."""

        def theirs(logits: Any, index: Any, temperature: float = 1.0, row_mask: Any = None) -> Any:
            raise AssertionError

        monkeypatch.setattr("transformers.utils.is_triton_available", lambda: True)
        monkeypatch.setattr(trainer_utils, "is_triton_available", lambda: True)
        monkeypatch.setattr(trainer_utils, "_fused_logprob_entropy", theirs, raising=False)
        logits, index = torch.randn(2, 3, 11), torch.randint(11, (2, 3))
        expected = trainer_utils.selective_log_softmax_and_entropy(logits, index, temperature=0.5)
        monkeypatch.setattr(trainer_utils, "_supports_trl_loss_kernel", lambda *_: True)
        with patch():
            assert trainer_utils._fused_logprob_entropy is selective_log_softmax_and_entropy
            found = trainer_utils.selective_log_softmax_and_entropy(logits, index, temperature=0.5)
            alone = trainer_utils.selective_log_softmax(logits / 0.5, index)
            entropy = trainer_utils.entropy_from_logits(logits / 0.5)
        assert trainer_utils._fused_logprob_entropy is theirs
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close((alone, entropy), expected)

    def test_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transformers.utils.is_triton_available", lambda: False)
        monkeypatch.delattr(trainer_utils, "_fused_logprob_entropy", raising=False)
        with patch():
            assert not hasattr(trainer_utils, "_fused_logprob_entropy")
            assert trainer_utils._ChunkedLogProbFunction is ChunkedLogProbFunction
