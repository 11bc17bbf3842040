"""The training text: the source code of Python's standard library, which is part of every Python."""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

__all__ = ["Text", "load_text", "sample_batches", "validation_batch"]

LARGEST_CORPUS = 6_000_000
"""Characters of source code to use: enough for a vocabulary of 32k, and encoded in seconds."""

VALIDATION_SHARE = 0.05
"""The share of the characters, in whole files, that neither the tokenizer nor the model sees in training."""

END_OF_FILE = "<|end|>"

NOT_LIBRARY_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders in the standard library that differ between installations."""


@dataclass(frozen=True)
class Text:
    """The encoded files, one after the other: `training` and `validation` are (tokens,) int64."""

    training: Tensor
    validation: Tensor
    vocabulary: int
    files: int
    characters: int


def load_text(vocabulary: int, seed: int) -> Text:
    """Read the files, learn a byte-pair vocabulary of at most `vocabulary` entries on them, and encode them."""
    documents = _read_documents(seed)
    characters = sum(map(len, documents))
    held_back = 1
    while sum(map(len, documents[:held_back])) < VALIDATION_SHARE * characters:
        held_back += 1
    validation, training = documents[:held_back], documents[held_back:]
    tokenizer = _train_tokenizer(training, vocabulary)
    return Text(
        training=_encode(tokenizer, training),
        validation=_encode(tokenizer, validation),
        vocabulary=tokenizer.get_vocab_size(),
        files=len(documents),
        characters=characters,
    )


def sample_batches(text: Text, steps: int, batch: int, context: int, seed: int) -> Tensor:
    """Draw all batches of a run at once, (steps, batch, context + 1) int64, so that both runs get the same."""
    generator = torch.Generator().manual_seed(seed)
    last_start = len(text.training) - context
    if last_start < 1:
        raise ValueError(f"the text has {len(text.training)} tokens, too few for sequences of {context}")
    starts = torch.randint(last_start, (steps, batch, 1), generator=generator)
    return text.training[starts + torch.arange(context + 1)]


def validation_batch(text: Text, sequences: int, context: int) -> Tensor:
    """Return evenly spaced sequences of the held-out files, (sequences, context + 1)."""
    last_start = len(text.validation) - context - 1
    if last_start < 0:
        raise ValueError(f"the held-back text has {len(text.validation)} tokens, too few for sequences of {context}")
    starts = torch.linspace(0, last_start, sequences).long()
    return text.validation[starts[:, None] + torch.arange(context + 1)]


def _read_documents(seed: int) -> list[str]:
    """Read library files in an order that depends only on the seed, up to the size limit.

    They are shuffled because otherwise the limit would keep only names with the first letters of the alphabet, and all
    held-out files would be of one package.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if NOT_LIBRARY_SOURCE.isdisjoint(name.split("/"))]
    random.Random(seed).shuffle(names)
    documents: list[str] = []
    room = LARGEST_CORPUS
    for name in names:
        document = (root / name).read_text(encoding="utf-8", errors="replace")
        if document and len(document) <= room:
            documents.append(document)
            room -= len(document)
    if len(documents) < 2:
        raise FileNotFoundError(f"found {len(documents)} source files of the standard library under {root}; need 2")
    return documents


def _train_tokenizer(documents: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    end = tokenizer.token_to_id(END_OF_FILE)
    tokens = [token for encoding in tokenizer.encode_batch_fast(documents) for token in (*encoding.ids, end)]
    return torch.tensor(tokens)
