"""The emulator detects planted faults of every kind, and runs correct kernels."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.emulator.frontend import FrontendError
from tests.metal.emulator.kernels import Emulator
from tests.metal.emulator.launch import EmulatorError

ROW_SUMS = """
    uint row = threadgroup_position_in_grid.y;
    uint lane = thread_position_in_threadgroup.x;
    threadgroup float partial[32];
    float sum = 0.0f;
    for (uint c = lane; c < COLUMNS; c += threads_per_threadgroup.x) sum += static_cast<float>(x[row * COLUMNS + c]);
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float all = 0.0f;
    for (uint g = 0; g < simdgroups_per_threadgroup; ++g) all += partial[g];
    if (lane == 0) out[row] = static_cast<T>(all);
"""


@pytest.fixture(scope="module")
def emulator(kernel_folder: Any) -> Emulator:
    return Emulator(kernel_folder)


def launch(
    emulator: Emulator, body: str, x: mx.array, header: str = "", threads: int = 96, rows: int | None = None
) -> mx.array:
    kernel = emulator.metal_kernel("rows", ["x"], ["out"], body, header=header)
    rows = x.shape[0] if rows is None else rows
    (out,) = kernel(
        inputs=[x],
        template=[("T", x.dtype), ("COLUMNS", x.shape[1])],
        output_shapes=[(x.shape[0],)],
        output_dtypes=[x.dtype],
        grid=(threads, rows, 1),
        threadgroup=(threads, 1, 1),
    )
    return out


def numbers(dtype: mx.Dtype = mx.float32, columns: int = 500) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(-8, 9, (7, columns)).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("columns", [1, 3])
def test_small_inputs_arrive_in_constant_memory(emulator: Emulator, columns: int) -> None:
    x = mx.ones((2, columns))
    out = launch(emulator, ROW_SUMS, x)
    assert "const constant float* x" in emulator.sources[-1].text
    assert out.tolist() == [columns] * 2


def test_threads_run_in_many_orders(emulator: Emulator) -> None:
    body = "out[0] = static_cast<float>(thread_position_in_threadgroup.x);"
    last = [launch(emulator, body, mx.ones((1, 9))).item() for _ in range(9)]
    assert len(set(last)) > 4


BARRIER, WRITE = "threadgroup_barrier(mem_flags::mem_threadgroup);", "if (lane == 0) out[row]"
FIRST = "if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = 1.0f;\n    "
WIDE = "float4 wide = *reinterpret_cast<const device float4*>(x + 1);\n    if (lane == 0) out[row] += wide.x;\n    "
FAULTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "no barrier": (BARRIER, "", r"uninitialised threadgroup memory|missing barrier", {}),
    "barrier of nothing": ("mem_flags::mem_threadgroup", "mem_flags::mem_none", "missing barrier", {}),
    "barrier of other memory": ("mem_flags::mem_threadgroup", "mem_flags::mem_device", "missing barrier", {}),
    "no barrier before memory is used again": (
        WRITE, FIRST + WRITE, r"missing barrier: .* (read|wrote) since the last barrier", {},
    ),
    "divergent collective": (
        "sum = simd_sum(sum);", "sum = lane % 2 ? simd_sum(sum) : simd_max(sum);", "divergent collective", {},
    ),
    "shuffle from a missing lane": (
        "simd_sum(sum)", "simd_shuffle(sum, static_cast<ushort>(31))", "inactive lane", {"threads": 40},
    ),
    "uninitialised threadgroup memory": (
        "g < simdgroups_per_threadgroup", "g < 32",
        r"uninitialised threadgroup memory: .* element 3 of variable 0", {},
    ),
    "threadgroup memory out of bounds": (
        "partial[32]", "partial[2]", r"out of bounds: .* element 2 of variable 0, which has 2", {},
    ),
    "too much threadgroup memory": ("partial[32]", "partial[8193]", "32772 bytes are used and there are 32768", {}),
    "empty grid": ("", "", "empty grid", {"rows": 0}),
    **{
        f"write at {by:+}": ("out[row]", f"(out + row)[{by}]", r"out of bounds: .*out", {})
        for by in (7, 8, 5000, 10**8, -7, -606, -(10**8))
    },
    "misaligned access": (WRITE, WIDE + WRITE, "misaligned access", {"columns": 512}),
    "write to an input": (
        WRITE, "const_cast<device T*>(x)[lane] = 1.0f;\n    " + WRITE, "x was written to, which is an input", {},
    ),
}  # fmt: skip
"""What is replaced, by what, and the error of the emulator."""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_detected(emulator: Emulator, name: str) -> None:
    right, wrong, message, options = FAULTS[name]
    x = numbers(columns=options.get("columns", 500))
    launch(emulator, ROW_SUMS, x)
    more = {key: value for key, value in options.items() if key != "columns"}
    with pytest.raises(EmulatorError, match=message):
        launch(emulator, ROW_SUMS.replace(right, wrong), x, **more)


@pytest.mark.parametrize(
    "guard",
    [
        "if (lane < 50)",
        "if (lane % 2 == 0)",
        "if (simdgroup_index_in_threadgroup > 0)",
        "if (lane > 40) return; else",
        "if (lane > 40) threadgroup_barrier(mem_flags::mem_threadgroup);\n    else",
    ],
)
def test_divergent_barrier(emulator: Emulator, guard: str) -> None:
    body = f"""
        uint lane = thread_position_in_threadgroup.x;
        {guard} threadgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) out[threadgroup_position_in_grid.y] = x[0];
    """
    with pytest.raises(EmulatorError, match="divergent barrier"):
        launch(emulator, body, numbers())


def test_too_many_threads(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match=r"Thread group size \(1056\) is greater than .* \(1024\)"):
        launch(emulator, ROW_SUMS, numbers(), threads=1056)


@pytest.mark.parametrize("change", ["row * COLUMNS + c + 1", "row * COLUMNS + c - 1"])
def test_read_beside_an_input(emulator: Emulator, change: str) -> None:
    """An access one element out of bounds faults if the input is at that end of its pages.

    A few launches have both ends.
    """
    body = ROW_SUMS.replace("x[row * COLUMNS + c]", f"x[static_cast<int>({change})]")
    found = []
    for _ in range(12):
        try:
            launch(emulator, body, numbers())
        except EmulatorError as error:
            found.append(str(error))
    assert found
    assert all("x was touched" in message for message in found)


def test_unwritten_output_is_nan(emulator: Emulator) -> None:
    out = launch(emulator, ROW_SUMS.replace("if (lane == 0)", "if (lane == 0 && row != 3)"), numbers())
    assert np.isnan(np.array(out)).tolist() == [False, False, False, True, False, False, False]


@pytest.mark.parametrize("function", ["simd_max", "simd_min"])
def test_nan_in_a_collective_with_undefined_result(emulator: Emulator, function: str) -> None:
    body = ROW_SUMS.replace("sum = simd_sum(sum)", f"sum = {function}(sum)")
    launch(emulator, body, numbers())
    with pytest.raises(EmulatorError, match=f"undefined result: .* {function} is handed NaN"):
        launch(emulator, body, mx.full((7, 500), mx.nan))


def computed(emulator: Emulator, expression: str, *values: float) -> list[float]:
    x = mx.array([*values, *([1.0] * 8)])
    kernel = emulator.metal_kernel(
        "values",
        ["x"],
        ["out"],
        f"float z = x[thread_position_in_grid.x]; out[thread_position_in_grid.x] = {expression};",
    )
    (out,) = kernel(
        inputs=[x], output_shapes=[x.shape], output_dtypes=[mx.float32], grid=(x.size, 1, 1), threadgroup=(32, 1, 1)
    )
    return np.array(out)[: len(values)].tolist()


def test_fast_functions_outside_of_their_range(emulator: Emulator) -> None:
    zero, *others = computed(emulator, "fast::exp(z)", 0.0, -np.inf, np.inf, np.nan, 200.0)
    assert zero == 1
    assert others == [0.8125] * 4
    assert computed(emulator, "fast::log(z)", -1.0, 0.0, np.inf, np.nan) == [0.8125] * 4
    assert computed(emulator, "precise::exp(z)", -np.inf, np.inf) == [0, np.inf]


def test_maximum_of_a_number_and_nan_may_be_either(emulator: Emulator) -> None:
    numbers = np.random.default_rng(0).normal(size=64)
    found = np.array(computed(emulator, "metal::max(z, NAN)", *numbers))
    assert 16 < np.isnan(found).sum() < 48
    assert not np.isnan(computed(emulator, "metal::fmax(z, NAN)", *numbers)).any()


HELPER = "inline float first({space} float* p) {{ return p[0]; }}\n"


@pytest.mark.parametrize("space", ["const threadgroup", "const constant", "const", "const thread", "device"])
def test_wrong_address_space(emulator: Emulator, space: str) -> None:
    right, wrong = (HELPER.format(space=given) for given in ("const device", space))
    body = ROW_SUMS.replace("out[row] = static_cast<T>(all)", "out[row] = all + first(x)")
    launch(emulator, body, numbers(), header=right)
    for header, x in ((wrong, numbers()), (right, mx.ones((2, 3)))):  # a small input is not device memory
        with pytest.raises(FrontendError, match=r"no matching function|no address space|discards"):
            launch(emulator, body, x, header=header)


@pytest.mark.parametrize(
    "statement", ["int i = sum;", "uint i = size_t(row);", "half h = sum;", "float f = 0.1;", "float f = x[0] * 1.5;"]
)
def test_implicit_narrowing(emulator: Emulator, statement: str) -> None:
    body = ROW_SUMS.replace("float all = 0.0f;", f"float all = 0.0f;\n    {statement}")
    with pytest.raises(FrontendError, match="implicit conversion"):
        launch(emulator, body, numbers())
