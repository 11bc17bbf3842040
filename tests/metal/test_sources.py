"""The Metal sources: what makes MLX build another kernel, and that planted faults are detected."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.metal.emulator.kernels import Emulator
from tests.metal.emulator.launch import EmulatorError, launch
from tests.metal.emulator.memory import Buffer
from xent.backends.metal import rows, sources
from xent.backends.metal.sources import threads_and_held
from xent.backends.mlx.kernels import Facts
from xent.core.call import Call, Classes, Given

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def only_new_kernels(emulator: Emulator) -> None:
    sources.mlx_kernel.cache_clear()
    emulator.sources.clear()


def loss_and_gradient(
    vocabulary: int = 5000, rows: int = 3, dtype: mx.Dtype = mx.float32, **options: object
) -> mx.array:
    logits, classes = mx.array(RNG.normal(size=(rows, vocabulary)).astype(np.float32)), mx.zeros((rows,), mx.int32)
    logits = logits.astype(dtype)
    return mx.value_and_grad(lambda z: xent.cross_entropy(z, classes, backend="metal", **options))(logits)[1]


def test_new_values_of_options_build_no_new_kernel(emulator: Emulator) -> None:
    for label_smoothing, z_loss, softcap, logit_scale in ((0.1, 0.1, 3.0, 0.5), (0.2, 0.3, 4.0, -2.0)):
        loss_and_gradient(
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale, normalizer=z_loss
        )
    assert len(emulator.sources) == 1


def test_rows_and_nearby_vocabularies_share_a_kernel(emulator: Emulator) -> None:
    for vocabulary, count in ((2100, 8), (4000, 30), (4096, 9)):
        loss_and_gradient(vocabulary, count)
    assert len(emulator.sources) == 1


def test_loss_alone_writes_no_gradient(emulator: Emulator) -> None:
    logits, classes = mx.zeros((9, 50)), mx.zeros((9,), mx.int32)
    xent.cross_entropy(logits, classes, backend="metal")
    (source,) = emulator.sources
    assert "GRAD" in source.text
    assert float(xent.cross_entropy(logits, classes, backend="metal")) == pytest.approx(np.log(50))


def test_compiler_fuses_no_products_and_sums_by_itself(emulator: Emulator) -> None:
    """If Apple's compiler fused them in one kernel only, a row's loss would depend on other requested results."""
    loss_and_gradient()
    xent.cross_entropy(mx.zeros((9, 50)), mx.zeros((9,), mx.int32), backend="metal")
    assert len(emulator.sources) == 2
    for source in emulator.sources:
        before, _, _ = source.text.partition("namespace xent")
        assert "\n#pragma METAL fp contract(off)\n" in before


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("sums", "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);", "", r"missing|uninitialised"),
        ("sums", "mem_flags::mem_threadgroup", "mem_flags::mem_device", "missing barrier"),
        ("sums", "if (lane < groups)", "", "uninitialised"),
        ("sums", "  sums = no_sums();", "if (group > 3) threadgroup_barrier(mem_flags::mem_none);", "divergent"),
        ("rows", "packs = V / xent::width<T>", "packs = V / xent::width<T> + 1", "out of bounds"),
        ("maths", "packed_uint4", "uint4", "misaligned access"),
        ("loss", "columns.edge < columns.count", "columns.edge <= columns.count", "out of bounds"),
        ("rows", "threadgroup xent::Sums shared[32]", "threadgroup xent::Sums shared[4]", "out of bounds"),
    ],
)
def test_planted_faults_are_detected(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str, message: str
) -> None:
    read = sources._read
    assert right in read(file)
    monkeypatch.setattr(sources, "_read", _changed(read, file, right, wrong))
    with pytest.raises(EmulatorError, match=message):
        several_launches()


def several_launches() -> None:
    """Run a kernel often enough that some buffer of each name ends where its pages end."""
    for _ in range(8):
        loss_and_gradient(5001, 1)


def _changed(read: Callable[[str], str], file: str, right: str, wrong: str) -> Callable[[str], str]:
    return lambda name: read(name).replace(right, wrong) if name == file else read(name)


@pytest.mark.parametrize("row", [2047, 2048, 4199])
def test_rows_beyond_2_to_the_31_and_32(emulator: Emulator, row: int) -> None:
    """A row far into logits whose memory is mostly unused has the same result as the only row of other logits."""
    vocabulary, count = 2**20 + 3, 4200
    logits = RNG.normal(size=vocabulary).astype(np.float16)
    alone = rows.forward(mx.array(logits)[None], facts_of_one_row(vocabulary), {"loss", "grad"})
    (source,) = emulator.sources
    ones, zeros = np.ones(count, np.float32), np.zeros(count, np.float32)
    bound = {
        "logits_shape": np.array([count, vocabulary], np.int32),
        "numbers": np.array(facts_of_one_row(vocabulary).numbers),
        "target": np.full(count, 5, np.int32),
        "weight": ones,
        "scale": ones,
        "excluded": np.zeros(count, np.bool_),
    }
    buffers = {}
    for name in (parameter.name for parameter in source.parameters if parameter.attribute.startswith("buffer")):
        if name in ("logits", "grad"):
            buffers[name] = Buffer(name, 2 * count * vocabulary, poisoned=False)
        else:
            buffers[name] = Buffer(name, bound.get(name, zeros).nbytes)
            buffers[name].fill(bound.get(name, zeros))
    start = 2 * row * vocabulary
    buffers["logits"].fill(logits, start)
    threads, _ = threads_and_held(vocabulary, mx.float16.size)
    launch(emulator.workshop, source, buffers, (threads, count, 1), (threads, 1, 1), 0, only=(0, row, 0))
    np.testing.assert_array_equal(buffers["grad"].array(np.float16, (vocabulary,), start), np.array(alone["grad"])[0])
    assert buffers["loss"].array(np.float32, (count,))[row] == alone["loss"].item()
    for buffer in buffers.values():
        buffer.close()


def facts_of_one_row(vocabulary: int) -> Facts:
    return Facts(
        call=Call(Given(None, 1), Classes(None)),
        numbers=mx.array([0, 0, 0, 1, 0, vocabulary, 0, 0], mx.float32),
        target=mx.array([5]),
        weight=mx.ones((1,)),
        scale=mx.ones((1,)),
        excluded=mx.zeros((1,), mx.bool_),
        ignored=mx.zeros((1,), mx.bool_),
    )
