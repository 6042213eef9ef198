"""What flags accept."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from headway.cli import values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4G", 4 * 10**9),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("4gi", 4 * 2**30),
        ("1.5M", 1_500_000),
        ("512 MiB", 512 * 2**20),
        ("2T", 2 * 10**12),
        ("123456", 123456),
    ],
)
def test_sizes(text: str, size: int):
    assert values.memory_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-4G", "0", "0.5", "4X", "4Gi4", "nan", "1e9", "i", "4iB"])
def test_what_is_no_size(text: str):
    with pytest.raises(ArgumentTypeError):
        values.memory_size(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4", 4 * 2**30), ("0.5", 2**29), ("0", 0), ("512M", 512 * 10**6), ("1GiB", 2**30)]
)
def test_swap_space_is_in_gib_where_no_unit_is_named(text: str, size: int):
    assert values.swap_size(text) == size


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "x", "4X", ""])
def test_what_is_no_swap_space(text: str):
    with pytest.raises(ArgumentTypeError):
        values.swap_size(text)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (values.positive, ["1", "12"], ["0", "-1", "1.5", "x", ""]),
        (values.natural, ["0", "7"], ["-1", "x"]),
        (values.share, ["0.1", "1"], ["0", "1.01", "nan", "x"]),
        (values.rate, ["0.5", "inf"], ["0", "-1", "nan"]),
        (values.nonnegative, ["0", "2.5"], ["-0.1", "inf", "nan"]),
    ],
)
def test_numbers(check, right: list[str], wrong: list[str]):
    for text in right:
        assert check(text) == float(text)
    for text in wrong:
        with pytest.raises(ArgumentTypeError):
            check(text)


def test_tenant_weights():
    assert values.tenant_weight("big=2.5") == ("big", 2.5)
    assert values.tenant_weight("a=b=1") == ("a=b", 1.0)
    for wrong in ("big", "=2", "big=", "big=0", "big=-1", "big=inf", "big=x"):
        with pytest.raises(ArgumentTypeError):
            values.tenant_weight(wrong)
