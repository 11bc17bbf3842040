"""Only the known kind of report of the sanitizer is ignored."""

from tests.triton.watch import COMPILERS_OWN, KERNELS, unexplained

SOURCE = (KERNELS / "hopper" / "product_kernel.py").read_text(encoding="utf-8").splitlines()
BEGINNING, AROUND = (n for n, line in enumerate(SOURCE, 1) if any(own in line for own in COMPILERS_OWN))


def race(*lines: int, name: str = "product_kernel") -> list[str]:
    first, *rest = lines
    return [
        "========= COMPUTE-SANITIZER",
        f"========= Error: Race reported between Read access at {name}+0x130 in {name}.py:{first}",
        *(f"=========     and Write access at {name}+0x1ac0 in {name}.py:{line} [9 hazards]" for line in rest),
        "========= ",
        "a line of the program's own",
    ]


def test_generated_code_is_ignored() -> None:
    assert unexplained(race(BEGINNING, BEGINNING, AROUND)) == []


def test_lines_of_the_source_are_reported() -> None:
    assert len(unexplained(race(BEGINNING, AROUND, AROUND + 30) + race(BEGINNING, AROUND) + race(1, 2))) == 2
    assert len(unexplained(race(BEGINNING, AROUND, name="rows_kernel"))) == 1
    assert len(unexplained(race(10**6, AROUND))) == 1


def test_races_in_kernels_of_libraries_are_ignored() -> None:
    template = "void at::native::reduce_kernel<(int)512, at::native::ReduceOp<bool>>(T3)"
    for kernel in (template, "nvjet_sm90_hsh_64x8_64x16_1x1_h_bz_splitK_NNT"):
        report = [
            f"========= Error: Race reported between Read access at {kernel}+0xaf0",
            f"=========     and Write access at {kernel}+0x2eb0 [408 hazards]",
        ]
        assert unexplained(report) == []
    nowhere = [line.partition(" in product_kernel.py")[0] for line in race(BEGINNING, AROUND)]
    assert len(unexplained(nowhere)) == 1


def test_memory_errors_are_reported() -> None:
    lines = [
        "========= COMPUTE-SANITIZER",
        "========= Invalid __global__ read of size 8 bytes",
        "=========     at product_kernel+0x130 in product_kernel.py:1",
        "=========     Access at 0x10 is out of bounds",
        "========= ",
        "========= ERROR SUMMARY: 1 error",
    ]
    (error,) = unexplained(lines)
    assert error.startswith("Invalid __global__ read")
    assert "out of bounds" in error
    assert unexplained(lines[:1] + lines[4:]) == []
