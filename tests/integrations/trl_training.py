"""TRL's own trainers on a tiny model with a vocabulary of words. Models, tokenizer and data are created here."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
from torch import Tensor

__all__ = ["TRAINERS", "Run", "make_model", "make_tokenizer", "train"]

WORDS = 60
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
KINDS = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "granite": ("GraniteConfig", {"logits_scaling": 0.5}),
    "phi": ("PhiConfig", {}),  # a head with bias
}


@dataclass
class Run:
    """The measurements of a trainer, step by step."""

    logs: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


class Watch(transformers.TrainerCallback):
    """Records gradients before each step, and weights and logs after it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.run.gradients.append(
            {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        )

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.run.weights.append({name: each.detach().clone() for name, each in model.named_parameters()})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        self.run.logs.append(
            {
                name: value
                for name, value in numbers.items()
                if not any(word in name for word in ("time", "runtime", "per_second", "mfu", "memory", "flos"))
            }
        )


def make_tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *(f"w{i}" for i in range(WORDS))])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)


def make_model(kind: str = "llama", seed: int = 0) -> Any:
    """Return a model with weights large enough for different logits, the same at each call."""
    name, more = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(
        vocab_size=WORDS + len(SPECIAL),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.3)
    return model


def words(count: int, seed: int) -> str:
    """Return that many words."""
    choose = random.Random(seed)
    return " ".join(f"w{choose.randrange(WORDS)}" for _ in range(count))


def _rows(make: Callable[[int], dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list([make(index) for index in range(12)])


def _sft(model: Any, settings: dict[str, Any]) -> Any:
    rows = _rows(lambda i: {"prompt": words(3 + i % 3, i), "completion": " " + words(4 + i % 4, 100 + i)})
    return trl.SFTTrainer(
        model, trl.SFTConfig(**settings), train_dataset=rows, eval_dataset=rows, processing_class=make_tokenizer()
    )


def _preference(index: int) -> dict[str, str]:
    chosen, rejected = words(4 + index % 3, 200 + index), words(3 + index % 4, 300 + index)
    return {"prompt": words(3, index), "chosen": " " + chosen, "rejected": " " + rejected}


def _dpo(model: Any, settings: dict[str, Any]) -> Any:
    return trl.DPOTrainer(
        model,
        args=trl.DPOConfig(**settings),
        train_dataset=_rows(_preference),
        processing_class=make_tokenizer(),
        **({"ref_model": make_model(seed=7)} if not hasattr(model, "peft_config") else {}),
    )


def _kto(model: Any, settings: dict[str, Any]) -> Any:
    rows = _rows(lambda i: {"prompt": words(3, i), "completion": " " + words(4 + i % 3, 400 + i), "label": i % 2 == 0})
    return trl.KTOTrainer(
        model,
        ref_model=make_model(seed=7),
        args=trl.KTOConfig(**settings),
        train_dataset=rows,
        processing_class=make_tokenizer(),
    )


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Return higher rewards for early words of the vocabulary."""
    return [sum(word < "w3" for word in each.split()) / 8 for each in completions]


def _grpo(model: Any, settings: dict[str, Any]) -> Any:
    reference = Path(settings["output_dir"]) / "reference"  # the trainer loads it from there
    make_model(seed=7).save_pretrained(reference)
    model.config._name_or_path = str(reference)
    sampling = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.7, "beta": 0.04}
    return trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**sampling, **settings),
        train_dataset=_rows(lambda i: {"prompt": words(3 + i % 2, i)}),
        processing_class=make_tokenizer(),
    )


def _distillation(model: Any, settings: dict[str, Any]) -> Any:
    return trl.DistillationTrainer(
        model,
        teacher_model=make_model("gemma2", seed=7),
        args=trl.DistillationConfig(max_completion_length=6, **{"beta": 0.5, "temperature": 0.9, **settings}),
        train_dataset=_rows(lambda i: {"prompt": words(3 + i % 2, i)}),
        processing_class=make_tokenizer(),
    )


TRAINERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "grpo": _grpo,
    "distillation": _distillation,
}


def train(name: str, model: Any, folder: Path, steps: int = 3, **settings: Any) -> tuple[Run, Any]:
    """Train for a few steps. Return the measurements and the trainer."""
    run = Run()
    common = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    trainer = TRAINERS[name](model, common | settings)
    trainer.add_callback(Watch(run))
    trainer.train()
    return run, trainer
