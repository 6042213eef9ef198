"""The key file: what it says, and one clear error with the line and the field for whatever is wrong in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headway.core.request import Slo
from headway.core.tenants import Tenant
from headway.server.keys import KeyFileError, Keyring, Rates


def read(tmp_path: Path, text: str) -> Keyring:
    path = tmp_path / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    return Keyring.read(path)


def test_what_it_says(tmp_path: Path) -> None:
    keys = read(
        tmp_path,
        f"""
sk-alpha:
  tenant: alpha
  weight: 2.5
  requests_per_minute: 600
  tokens_per_minute: 90000
  in_flight: 8
  priority: [0, 5]
  request_classes: [batch]
  min_ttft_slo_ms: 200
  min_deadline_ms: 5000
sk-alpha-2: {{tenant: alpha, weight: 2.5}}
"sha256:{hashlib.sha256(b"sk-hidden").hexdigest()}": {{tenant: ops, scope: admin}}
12345: {{tenant: number}}
""",
    )
    assert keys.tenants == {"alpha": Tenant(2.5, 8), "ops": Tenant(), "number": Tenant()}
    assert keys.rates["alpha"] == Rates(600, 90000)
    alpha, ops, number = keys.find("sk-alpha"), keys.find("sk-hidden"), keys.find("12345")
    assert alpha
    assert ops
    assert number
    assert (alpha.tenant, alpha.admin, alpha.priority, alpha.classes) == ("alpha", False, (0, 5), ("batch",))
    assert alpha.clamped(Slo(ttft=0.1, tpot=0.01, deadline=60.0)) == Slo(ttft=0.2, tpot=0.01, deadline=60.0)
    assert alpha.clamped(Slo()) == Slo()
    assert ops.admin
    for unknown in ("sk-alph", "sk-alpha ", "", "sk-alphaa", "é"):
        assert keys.find(unknown) is None
    assert "sk-alpha" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("", 1, "mapping"),
        ("- sk-a", 1, "mapping"),
        ("sk-a: {tenant: a", 1, "YAML"),
        ("sk-a:\n\ttenant: a", 2, "YAML"),
        ("sk-a: alpha", 1, "tenant"),
        ("sk-a: {}", 1, "tenant"),
        ("sk-a:\n  tenant: a\n  wait: 2", 3, "'wait'"),
        ("sk-a:\n  tenant: a\n  weight: heavy", 3, "weight"),
        ("sk-a:\n  tenant: a\n  weight: 0", 3, "weight"),
        ("sk-a:\n  tenant: a\n  weight: .inf", 3, "weight"),
        ("sk-a:\n  tenant: a\n  in_flight: 0", 3, "in_flight"),
        ("sk-a:\n  tenant: a\n  requests_per_minute: 1.5", 3, "requests_per_minute"),
        ("sk-a:\n  tenant: a\n  scope: root", 3, "scope"),
        ("sk-a:\n  tenant: a\n  priority: 5", 3, "priority"),
        ("sk-a:\n  tenant: a\n  priority: [5, 0]", 3, "priority"),
        ("sk-a:\n  tenant: a\n  request_classes: [fast]", 3, "request_classes"),
        ("sk-a:\n  tenant: a\n  min_deadline_ms: -1", 3, "min_deadline_ms"),
        ("sk-a:\n  tenant: a\n  tenant: b", 3, "second time"),
        ("sk-a: {tenant: a}\nsk-a: {tenant: b}", 2, "second time"),
        ("sk-a: {tenant: a, weight: 2}\nsk-b: {tenant: a, weight: 3}", 2, "contradicts 2.0 in line 1"),
        ("sk a: {tenant: a}", 1, "printable"),
        ("sha256:abc: {tenant: a}", 1, "64 hexadecimal"),
        ("sk-a:\n  tenant: 5", 2, "tenant"),
        ('sk-a:\n  tenant: "a\\nb"', 2, "tenant"),
        ("sk-a:\n  tenant: ' '", 2, "tenant"),
        ("sk-a:\n  tenant: a\n  [weight]: 2", 3, "name"),
        ("sk-a:\n  tenant: a\n  ? {b: c}\n  : 2", 3, "name"),
        ("sk-a: {tenant: 2026-99-99}", 1, "month"),
        ("sk-a: {tenant: !!int abc}", 1, "cannot be read"),
        ("sk-a: {<<: {tenant: a, weight: -1}}", 1, "weight"),
        ("sk-a: {<<: {tenant: a, priority: [5, 0]}}", 1, "priority"),
        ("sk-a: {tenant: a, weight: 2}\nsk-b: {<<: {tenant: a, weight: 3}}", 2, "contradicts 2.0 in line 1"),
        ("sk-a: " + "[" * 5000 + "]" * 5000, 1, "deep"),
        # What the engine's tables cannot hold must not come to it.
        ("sk-a:\n  tenant: a\n  in_flight: 100000000000000000000", 3, "in_flight"),
        ("sk-a:\n  tenant: a\n  priority: [3000000000, 4000000000]", 3, "priority"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: str, line: int, named: str) -> None:
    with pytest.raises(KeyFileError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert f"keys.yaml, line {line}: " in message
    assert named in message
    assert "\n" not in message
    assert "sk-a" not in message.partition(": ")[2] or "such as" in message, "a key is shown"


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read"):
        Keyring.read(tmp_path / "nothing.yaml")
