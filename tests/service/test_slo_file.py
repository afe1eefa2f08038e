"""The operator's SLO classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget
from tandem_service.slo_file import SloFileError, load_slo_classes


def test_a_file_replaces_the_default_classes_and_keeps_its_order(tmp_path: Path) -> None:
    assert load_slo_classes(None) == DEFAULT_SLO_CLASSES
    file = tmp_path / "slo.json"
    file.write_text(
        '{"voice": {"ttft_ms": 800, "tpot_ms": 60.5, "strict": true},'
        ' "b-2_x": {"e2e_ms": 9000, "waits": true}, "c": {}}'
    )
    classes = load_slo_classes(file)
    assert list(classes.values()) == [
        SloTarget("voice", ttft_s=0.8, tpot_s=0.0605, is_strict=True),
        SloTarget("b-2_x", e2e_s=9.0, waits=True),
        SloTarget("c"),
    ]
    assert list(classes) == ["voice", "b-2_x", "c"]


def test_objectives_may_be_relative_to_the_time_without_load(tmp_path: Path) -> None:
    file = tmp_path / "slo.json"
    file.write_text(
        '{"mail": {"ttft_ms": 500, "ttft_slowdown": 5, "e2e_slowdown": 10.5}, "c": {"tpot_slowdown": 1}}'
    )
    assert list(load_slo_classes(file).values()) == [
        SloTarget("mail", ttft_s=0.5, ttft_slowdown=5.0, e2e_slowdown=10.5),
        SloTarget("c", tpot_slowdown=1.0),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file: is not JSON"),
        ("[]", "the file: .*object"),
        ("{}", "the file: has fewer than 1 entries"),
        ('{"chat": {"ttft": 1}}', r"chat\.ttft: is unknown; did you mean ttft_ms\?"),
        ('{"chat": {"ttft_ms": 0}}', r"chat\.ttft_ms: must be more than 0"),
        ('{"chat": {"ttft_ms": -5}}', r"chat\.ttft_ms"),
        ('{"chat": {"ttft_ms": 1e12}}', r"chat\.ttft_ms: must be at most 86400000"),
        ('{"chat": {"ttft_ms": "800"}}', r"chat\.ttft_ms: must be a number"),
        ('{"chat": {"ttft_ms": NaN}}', r"chat\.ttft_ms"),
        ('{"chat": {"strict": 1}}', r"chat\.strict"),
        ('{"chat": {"strict": true, "waits": true}}', "chat: .*strict refuses late requests"),
        ('{"chat": {"ttft_slowdown": 0.9}}', r"chat\.ttft_slowdown: must be at least 1"),
        ('{"chat": {"e2e_slowdown": 1e9}}', r"chat\.e2e_slowdown: must be at most 10000"),
        ('{"Chat": {}}', "Chat: must match"),
        ('{"": {}}', "must match"),
        ("{" + ", ".join(f'"c{n}": {{}}' for n in range(17)) + "}", "has more than 16 entries"),
        ('{"chat": {}, "batch": {}, "chat": {"ttft_ms": 1}}', "chat is there twice"),
        ('{"chat": {"ttft_ms": 1, "ttft_ms": 2}}', "ttft_ms is there twice"),
    ],
)
def test_an_invalid_file_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "slo.json"
    file.write_text(text)
    with pytest.raises(SloFileError, match=complaint) as caught:
        load_slo_classes(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SloFileError, match=r"none\.json cannot be read: No such file"):
        load_slo_classes(tmp_path / "none.json")
