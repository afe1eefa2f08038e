"""Finds schemas that require themselves without an end, which no text can meet.

    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}},
                                          "required": ["n"]}}}

llguidance compiles them, and notices only when it writes the text. A part that requires itself, such as an
alternative, leads the text where it cannot end. A schema can be met if that follows from schemas which can be
met without it: the least fixed point, in time linear in the schema's size, as for Horn clauses (Dowling and
Gallier, 1984). Errs towards "can be met": names matched by patternProperties, and what follows only from
several parts of an allOf together, are not examined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tandem_core.schema_parts import SchemaPart


class Condition:
    """That a part can be met: when `num_missing` more of its needs are met."""

    __slots__ = ("dependents", "needs", "num_missing", "part")

    def __init__(self, part: SchemaPart, num_missing: int = 0) -> None:
        self.part = part
        self.num_missing = num_missing
        self.needs: list[Condition] = []
        self.dependents: list[Condition] = []

    def require(self, need: Condition) -> None:
        self.num_missing += 1
        self._may_need(need)

    def require_one(self, needs: Sequence[Condition]) -> None:
        choice = Condition(self.part, num_missing=1)
        for need in needs:
            choice._may_need(need)
        self.require(choice)

    def _may_need(self, need: Condition) -> None:
        self.needs.append(need)
        need.dependents.append(self)


def conditions_of(
    parts: Sequence[SchemaPart], targets: Mapping[SchemaPart, SchemaPart]
) -> dict[SchemaPart, Condition]:
    """Which parts can be met. `targets`: the parts behind each part's $ref."""
    conditions = {part: Condition(part, num_missing=int(part.schema is False)) for part in parts}
    for part, condition in conditions.items():
        for child in part.listed("allOf"):
            condition.require(conditions[child])
        if part in targets:
            condition.require(conditions[targets[part]])
        for keyword in ("anyOf", "oneOf"):
            if children := part.listed(keyword):
                condition.require_one([conditions[child] for child in children])
        by_type = []
        for groups in _needs_by_type(part):
            of_type = Condition(part)
            for group in groups:
                of_type.require_one([conditions[child] for child in group])
            by_type.append(of_type)
        if by_type:
            condition.require_one(by_type)
    met = [condition for condition in conditions.values() if not condition.num_missing]
    while met:
        for dependent in met.pop().dependents:
            dependent.num_missing -= 1
            if dependent.num_missing == 0:
                met.append(dependent)
    return conditions


def endless_part(condition: Condition) -> SchemaPart | None:
    """A part that requires itself, if the condition is not met for this reason."""
    seen: set[Condition] = set()
    unmet = [condition]
    while unmet and unmet[0].num_missing > 0:
        if unmet[0] in seen:
            return unmet[0].part
        seen.add(unmet[0])
        unmet = [need for need in unmet[0].needs if need.num_missing > 0 and need.needs]
    return None


def _needs_by_type(part: SchemaPart) -> list[list[list[SchemaPart]]]:
    """For each type of the part, groups of parts; an instance of the type has one of each group in it. Empty
    if a type needs none."""
    types = part.keywords.get("type")
    needs = []
    for kind in types if isinstance(types, list) else [types]:
        groups: list[list[SchemaPart]] = []
        if kind == "object":
            groups = list(_needs_of_object(part))
        elif kind == "array":
            groups = list(_needs_of_array(part))
        if not groups:
            return []
        needs.append(groups)
    return [] if part.keywords.get("nullable") else needs


def _needs_of_object(part: SchemaPart) -> Iterator[list[SchemaPart]]:
    keywords, others = part.keywords, part.child("additionalProperties")
    listed, named = keywords.get("required"), keywords.get("properties")
    required = {name: None for name in listed if isinstance(name, str)} if isinstance(listed, list) else {}
    for name in required:
        child = part.child("properties", name)
        if child is not None:
            yield [child]
        elif others is not None and "patternProperties" not in keywords:
            yield [others]
    if others is not None and _count(keywords.get("minProperties")) > len(required):
        optional = [name for name in named if name not in required] if isinstance(named, Mapping) else []
        more = (part.child("properties", name) for name in optional)
        yield [others, *part.listed("patternProperties"), *(child for child in more if child is not None)]


def _needs_of_array(part: SchemaPart) -> Iterator[list[SchemaPart]]:
    least = _count(part.keywords.get("minItems"))
    first = part.listed("prefixItems") or part.listed("items")
    others = part.child("items") or part.child("additionalItems")
    yield from ([child] for index, child in enumerate(first) if index < least)
    if others is not None and least > len(first):
        yield [others]


def _count(value: object) -> float:
    return value if isinstance(value, int | float) else 0
