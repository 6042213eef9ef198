"""The key file: who may use the server, as which tenant, and within which bounds."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from headway.core.errors import ModelError
from headway.core.request import Slo
from headway.core.tenants import Tenant

HASHED = "sha256:"
_KEY = re.compile(r"[\x21-\x7e]+")
_FIELD = re.compile(r" - at `\$\.(?P<field>\w+)[^`]*`$")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class KeyFileError(ModelError):
    """A key file that cannot be used: which line, which field, and what is wrong. Never a key."""


class Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the file says of one key."""

    tenant: Annotated[str, msgspec.Meta(min_length=1)]
    scope: Literal["infer", "admin"] = "infer"
    weight: Positive | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    in_flight: Count | None = None
    priority: tuple[Priority, Priority] | None = None
    request_classes: Annotated[list[Literal["realtime", "batch"]], msgspec.Meta(min_length=1)] | None = None
    min_ttft_slo_ms: Positive | None = None
    min_tpot_slo_ms: Positive | None = None
    min_deadline_ms: Positive | None = None


OF_THE_TENANT = ("weight", "requests_per_minute", "tokens_per_minute", "in_flight")
"""Fields that keys of the same tenant share: one states them, or all alike."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Whoever holds a key: its tenant, and what it may ask for.

    `priority`: the lowest and the highest number. `classes`: the allowed ones, any where empty. `least`: the shortest
    promises, in seconds, that it may ask for (0: any).
    """

    tenant: str
    admin: bool = False
    priority: tuple[int, int] = (-(2**31), 2**31 - 1)
    classes: tuple[str, ...] = ()
    least: Mapping[str, float] = field(default_factory=dict)

    def clamped(self, slo: Slo) -> Slo:
        """The promises asked for, none shorter than allowed."""
        return replace(slo, **{name: max(getattr(slo, name), least) for name, least in self.least.items()})


@dataclass(frozen=True, slots=True)
class Rates:
    """A tenant's quotas a minute, None where there is none."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Keyring:
    """Every key's holder, and every tenant's terms. Of the keys only SHA-256 hashes are kept."""

    holders: Mapping[bytes, Holder]
    tenants: Mapping[str, Tenant]
    rates: Mapping[str, Rates]

    def find(self, key: str) -> Holder | None:
        """Whose key it is. Takes the same time whichever it is, and however much of it is right."""
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for known, holder in self.holders.items():
            if hmac.compare_digest(known, digest):
                found = holder
        return found

    @classmethod
    def read(cls, path: str | Path) -> Keyring:
        """Raises KeyFileError: the file cannot be read, or something in it is wrong."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"{path}: cannot be read: {error}") from None
        return _Reader(str(path)).keyring(text)


class _Reader:
    """Makes a keyring of YAML nodes, which know their lines."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._holders: dict[bytes, Holder] = {}
        self._terms: dict[str, dict[str, tuple[Any, int]]] = {}

    def _wrong(self, line: int, what: str) -> KeyFileError:
        return KeyFileError(f"{self._path}, line {line}: {what}")

    def keyring(self, text: str) -> Keyring:
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise self._wrong(mark.line + 1 if mark else 1, f"not valid YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise self._wrong(1, f"not valid YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise self._wrong(1, "it is nested too deeply") from None
        if not isinstance(root, yaml.MappingNode) or not root.value:
            raise self._wrong(1, "wanted a mapping of keys to what their holders may do, such as `sk-...: {tenant: a}`")
        for key, node in root.value:
            self._add(loader, key, node)
        terms = {tenant: {name: value for name, (value, _) in said.items()} for tenant, said in self._terms.items()}
        return Keyring(
            self._holders,
            {name: Tenant(said.get("weight", 1.0), said.get("in_flight")) for name, said in terms.items()},
            {
                name: Rates(said.get("requests_per_minute"), said.get("tokens_per_minute"))
                for name, said in terms.items()
            },
        )

    def _add(self, loader: yaml.SafeLoader, key: yaml.Node, node: yaml.Node) -> None:
        line = key.start_mark.line + 1
        digest = self._digest(key, line)
        if digest in self._holders:
            raise self._wrong(line, "this key stands here for the second time")
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(line, "wanted fields after the key, at least `tenant: NAME`")
        lines: dict[str, int] = {}
        for name, _ in node.value:
            at = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise self._wrong(at, "a field's name must be a word")
            if name.value in lines:
                raise self._wrong(at, f"{name.value} stands here for the second time")
            lines[name.value] = at
        try:
            entry = msgspec.convert(loader.construct_document(node), Entry)
        except yaml.MarkedYAMLError as error:
            raise self._wrong(line, f"not valid YAML: {error.problem}") from None
        except msgspec.ValidationError as error:
            raise self._fault(str(error), line, lines) from None
        except (ValueError, TypeError, RecursionError) as error:  # such as a date of the 99th
            raise self._wrong(line, f"a value cannot be read: {error}") from None
        self._check(entry, line, lines)
        self._holders[digest] = _holder(entry)

    def _digest(self, key: yaml.Node, line: int) -> bytes:
        if not isinstance(key, yaml.ScalarNode) or not _KEY.fullmatch(key.value):
            raise self._wrong(line, "a key must be printable ASCII without spaces")
        if not key.value.startswith(HASHED):
            return hashlib.sha256(key.value.encode()).digest()
        try:
            digest = bytes.fromhex(key.value.removeprefix(HASHED))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise self._wrong(line, f"after {HASHED} come the 64 hexadecimal digits of the key's SHA-256")
        return digest

    def _fault(self, message: str, line: int, lines: dict[str, int]) -> KeyFileError:
        if unknown := re.search(r"unknown field `(.*)`", message):
            known = ", ".join(Entry.__struct_fields__)
            return self._wrong(lines.get(unknown[1], line), f"there is no field {unknown[1]!r}; there are: {known}")
        if missing := re.search(r"missing required field `(\w+)`", message):
            return self._wrong(line, f"{missing[1]} is missing")
        found = _FIELD.search(message)
        if found is None:
            return self._wrong(line, message)
        what = message[: found.start()]
        at = lines.get(found["field"], line)  # a field may come from elsewhere, by `<<`
        return self._wrong(at, f"{found['field']}: {what[:1].lower()}{what[1:]}")

    def _check(self, entry: Entry, line: int, lines: dict[str, int]) -> None:
        if not entry.tenant.isprintable() or entry.tenant != entry.tenant.strip():
            at = lines.get("tenant", line)
            raise self._wrong(at, f"tenant: {entry.tenant!r} must be printable, without spaces at its ends")
        if entry.priority is not None and entry.priority[0] > entry.priority[1]:
            raise self._wrong(
                lines.get("priority", line), f"priority: the first of {list(entry.priority)} must be the lower"
            )
        said = self._terms.setdefault(entry.tenant, {})
        for name in OF_THE_TENANT:
            value = getattr(entry, name)
            if value is None:
                continue
            before, at = said.setdefault(name, (value, lines.get(name, line)))
            if before != value:
                raise self._wrong(
                    lines.get(name, line),
                    f"{name} {value} of tenant {entry.tenant!r} contradicts {before} in line {at}",
                )


def _holder(entry: Entry) -> Holder:
    least = {
        name: milliseconds / 1000
        for name, milliseconds in (
            ("ttft", entry.min_ttft_slo_ms),
            ("tpot", entry.min_tpot_slo_ms),
            ("deadline", entry.min_deadline_ms),
        )
        if milliseconds is not None
    }
    whole = Holder(entry.tenant)
    classes = tuple(entry.request_classes or ())
    return Holder(entry.tenant, entry.scope == "admin", entry.priority or whole.priority, classes, least)
