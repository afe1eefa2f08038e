"""The size of a regular expression, written out; and where dialects differ."""

from __future__ import annotations

import pytest
from tandem_core.regex_size import MAX_SIZE, check_class_syntax, check_size, expanded_size


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a|b", 3),
        ("[abc]d", 2),
        (r"\d{3}", 3),
        ("a{2,5}b", 6),
        ("a{3,}", 3),
        ("a*b+c?", 3),
        ("(ab){4}", 8),
        ("((a{10}){10}){10}", 1000),
        ("x(a{2}(b{3}c){2}){2}", 21),
        (r"[{5}(]{3}", 3),
        (r"\({3}", 3),
        ("[]{5}a]{2}", 2),
        ("(a{9}", 9),
        ("a)", 2),
        ("{3}", 0),
        ("(){7}", 7),
        ("a{999999999}{999999999}", 10**12),
    ],
)
def test_it_counts_what_repetitions_make(pattern: str, size: int) -> None:
    assert expanded_size(pattern) == size


def test_only_large_ones_are_wrong() -> None:
    assert check_size("a" * MAX_SIZE) == ""
    assert str(MAX_SIZE) in check_size("a" * (MAX_SIZE + 1))


@pytest.mark.parametrize("pattern", ["[[:alpha:]]", "[a&&b]", "[a--b]", "[a~~b]", "x[^[]", r"\[[[]"])
def test_syntax_of_other_dialects_in_a_class_is_wrong(pattern: str) -> None:
    assert "escape it" in check_class_syntax(pattern)


@pytest.mark.parametrize("pattern", [r"[\[]", r"\[[a]", "a&&b--", "[a-z]--[b]", "[-+*/]", "[]a]", "[", "\\"])
def test_what_means_the_same_everywhere_is_right(pattern: str) -> None:
    assert check_class_syntax(pattern) == ""
