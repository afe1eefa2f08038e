"""The families by the model_type of their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tandem_core.errors import InvariantError, ModelLoadError, quoted
from tandem_core.model.spec import ModelSpec

from tandem_engine.models.families.config import Config
from tandem_engine.models.families.names import LLAMA, Names


@dataclass(frozen=True)
class Family:
    read: Callable[[Config], ModelSpec]
    names: Callable[[Config], Names]
    #: Values of configs that leave them out.
    defaults: Mapping[str, Any]
    #: Our name of a value -> the file's.
    aliases: Mapping[str, str]

    def parse(self, raw: Mapping[str, Any]) -> tuple[ModelSpec, Names]:
        """Raises ModelLoadError, and what garbled values raise: KeyError, TypeError, ValueError."""
        config = Config(raw, self.defaults, self.aliases)
        return self.read(config), replace(self.names(config), nested=config.nested)


FAMILIES: dict[str, Family] = {}


def family(
    *model_types: str,
    names: Names | Callable[[Config], Names] = LLAMA,
    aliases: Mapping[str, str] = MappingProxyType({}),
    **defaults: Any,
) -> Callable[[Callable[[Config], ModelSpec]], Callable[[Config], ModelSpec]]:
    """Registers config -> spec under these names."""

    def register(read: Callable[[Config], ModelSpec]) -> Callable[[Config], ModelSpec]:
        if twice := FAMILIES.keys() & set(model_types):
            raise InvariantError(f"two families are called {', '.join(twice)}")
        of = (lambda _: names) if isinstance(names, Names) else names
        FAMILIES.update(dict.fromkeys(model_types, Family(read, of, defaults, aliases)))
        return read

    return register


_LISTED = "`tandem model list --families` lists those that are"


def check_architecture(name: object, where: object) -> str:
    """The model_type, if models of this architecture can be computed. Raises ModelLoadError."""
    if not name:
        raise ModelLoadError(f"{where} names no architecture; {_LISTED}")
    if name not in FAMILIES:
        raise ModelLoadError(f"{where}: architecture {quoted(str(name))} is not supported; {_LISTED}")
    return str(name)
