"""Pages and docstrings name only what exists, and figures are those of the results pages.

Each check is a function from a text to sentences about its faults. Tests apply it to the repository, and show
that it finds a seeded fault.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
import typer
from tandem_cli.main import app
from tandem_service.metric_table import TABLE

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
#: Variables of make -> the command that gets their flags.
FLAGS_OF = {"UP": "tandem up"} | {
    variable: script
    for script, variable in re.findall(r"\$\(BIN\)/python (\S+) .*\$\((\w+)\)$", MAKEFILE, re.MULTILINE)
}
#: A field of answers shares the metrics' prefix.
METRICS = {series for row in TABLE for series in (row.name, *row.series)} | {"tandem_receipts"}
MOST_LINES = 60

# -- what there is -------------------------------------------------------------------------------------------


@cache
def tracked() -> tuple[str, ...]:
    """Tracked files and those about to be (untracked, not ignored)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return tuple(line for line in listed.stdout.splitlines() if (ROOT / line).is_file())


@cache
def folders() -> frozenset[str]:
    """Among them packages, whose names begin as those of metrics."""
    return frozenset(part for path in tracked() for part in PurePosixPath(path).parts[:-1])


@cache
def exists(name: str) -> bool:
    """A tracked file of this path, or of one that ends so; `*` stands for any characters."""
    ending = f"/{name.lstrip('./')}"
    return any(f"/{path}".endswith(ending) or fnmatch(f"/{path}", f"*{ending}") for path in tracked())


@cache
def script_options(script: str) -> frozenset[str]:
    """Of a script that uses argparse, and of those in its folder whose options it adds."""
    path = ROOT / script / "__main__.py" if (ROOT / script).is_dir() else ROOT / script
    source = path.read_text()
    options = set(re.findall(r'add(?:_argument)?\(\s*"(--[\w-]+)', source)) | {"--help"}
    for module in re.findall(r"^from (\w+) import .*add_\w*arguments", source, re.MULTILINE):
        options |= script_options(f"{PurePosixPath(script).parent}/{module}.py")
    return frozenset(options)


@cache
def tandem() -> typer.core.TyperGroup:
    return typer.main.get_command(app)


def tandem_options(words: list[str]) -> set[str] | None:
    """Of the command that the words begin with; None if there is no such command."""
    command, options = tandem(), {"--help"}
    for word in words:
        if not isinstance(command, typer.core.TyperGroup) or not re.fullmatch("[a-z]+", word):
            break
        if word not in command.commands:
            return None
        command = command.commands[word]
        # Some read their options as settings.
        options |= {f"--{name}" for name in settings_of(f"cli/tandem_cli/{word}")}
    return options.union(*([*option.opts, *option.secondary_opts] for option in command.params))


@cache
def settings_of(folder: str) -> frozenset[str]:
    """Names of settings, as the command line has them; none if the folder of services/ has no settings."""
    paths = [
        ROOT / "services" / name / "settings.py"
        for name in (folder, "common/tandem_service", "pod/tandem_pod")
    ]
    if not paths[0].exists():
        return frozenset()
    fields = (name for path in paths for name in re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE))
    return frozenset(name.replace("_", "-") for name in fields)


# -- names ---------------------------------------------------------------------------------------------------

FILE = re.compile(
    r"(?<![\w/.:~$<>{}*-])((?:\.\./)*(?:[\w.-]+/)*[a-z][\w.*-]*\.(?:py|md|proto|cpp|h|toml))(?![\w/(])"
)
FOREIGN = re.compile(r"llama\.cpp|(?:vllm|backends)/.*")
SCRIPT = re.compile(
    r"(?:python3? (?:-\w+ )*|(?<=[` (]))((?:benchmarks|deploy|tests)/(?:gpu|[\w/]+\.py))((?: [^`\n|#;&]*)?)"
)
TANDEM = re.compile(r"(?:(?<=`)|(?<=bin/)|^[ $>]*)tandem ([^`\n|#;&]+)", re.MULTILINE)
MAKE = re.compile(r"(?:(?<=`)|^[ $]*)make ([a-z][a-z-]*)(?![\w.])", re.MULTILINE)
METRIC = re.compile(r"(?<![\w./-])tandem_[a-z0-9_]+(?![\w*/.(:-])")


def wrong_names(text: str) -> list[str]:
    """Files, commands, options, make targets, settings and metrics in the text that do not exist."""
    # Commands that go on in the next line.
    text = re.sub(r" *\\?\n\s+(?=\[?--)", " ", text)
    text = re.sub(r"(?<!`)`[^`\n]+\n?[^`\n]*`", lambda span: span[0].replace("\n", " "), text)
    # What an option names is the user's.
    files = FILE.findall(re.sub(r"(--[\w-]+)[ =]([^\s`-][^\s`]*)", r"\1", text))
    roles = re.findall(r"--set (\w+)\.([a-z-]+)", text)
    faults = [f"no file {name}" for name in files if not FOREIGN.fullmatch(name) and not exists(name)]
    faults += [f"no make target {name}" for name in MAKE.findall(text) if name not in TARGETS]
    faults += [f"no metric {name}" for name in METRIC.findall(text) if name not in METRICS | folders()]
    faults += [f"no setting {role}.{name}" for role, name in roles
               if name not in settings_of(f"{role}/tandem_{role}")]  # fmt: skip
    commands = [found for found in SCRIPT.findall(text) if (ROOT / found[0]).exists()]
    commands += [(FLAGS_OF[name], flags) for name, flags in re.findall(r'\b([A-Z]+)="([^"`]*)"', text)
                 if name in FLAGS_OF]  # fmt: skip
    commands += [("tandem", arguments) for arguments in TANDEM.findall(text)]
    for script, arguments in commands:
        line = f"{script} {arguments.strip()}"
        options = tandem_options(line.split()[1:]) if script.startswith("tandem") else script_options(script)
        # Flags in quotes are another command's.
        used = re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"'[^']*'|\"[^\"]*\"", "", arguments))
        if options is None:
            faults.append(f"no command {line}")
        else:
            faults += [f"{line}: no option {option}" for option in used if option not in options]
    return faults


def dead_links(text: str, folder: Path) -> list[str]:
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", text)
    return [f"no file {name}" for name in links if not (folder / name).exists()]


def prose_of(source: str) -> str:
    """Docstrings and comments of a Python file."""
    strings = re.finditer(r'(^[ \t]*)?[rf]?("""|\'\'\')(.*?)\2', source, re.MULTILINE | re.DOTALL)
    # What begins its line is no value.
    docstrings = [string[3] for string in strings if string[1] is not None]
    return "\n".join([*docstrings, *re.findall(r"^[ \t]*#:? ?(.*)$", source, re.MULTILINE)])


# -- figures -------------------------------------------------------------------------------------------------


def numbers_of(text: str) -> set[float]:
    found = re.findall(r"(?<![\w.])(?:\d[\d,]*)?\.?\d+(?!\w)", text)
    return {float(number.replace(",", "")) for number in found}


def wrong_numbers(text: str, pages: Mapping[str, str]) -> list[str]:
    """Numbers of sentences that link to results pages, where they are in none of these."""
    faults = []
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[])", " ".join(block.split())):
            linked = re.findall(r"\]\((?:\S*/)?benchmarks/results/([\w.-]+\.md)[^)]*\)", sentence)
            known = {number for page in linked for number in numbers_of(pages[page])}
            named = numbers_of(re.sub(r"\]\([^)]*\)|`[^`]*`", "", sentence)) if linked else set()
            faults += [f"{number:g} is not in {', '.join(linked)}" for number in sorted(named - known)]
    return faults


def repeated_lines(pages: Mapping[str, str], count: int = 10) -> list[str]:
    """Where `count` consecutive lines stand again, blank ones left out."""
    seen: dict[tuple[str, ...], str] = {}
    faults = []
    for name, text in pages.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for first in range(len(lines) - count + 1):
            place = f"{name}, line {first + 1}"
            if (before := seen.setdefault(tuple(lines[first : first + count]), place)) != place:
                faults.append(f"{place}: as {before}")
    return faults


def form_faults(text: str) -> list[str]:
    """What is wrong with a results page's length, its command or its hardware."""
    faults = [f"more than {MOST_LINES} lines"] if text.count("\n") > MOST_LINES else []
    commands = re.findall(
        r"^Command: `(?:\w+=\S+ )*(python (?:benchmarks|tests)/\S+|make |tandem )", text, re.MULTILINE
    )
    scripts = [command.split()[1] for command in commands if command.startswith("python")]
    if not commands or not all((ROOT / script).exists() for script in scripts):
        faults.append("no `Command:` of a script, make or tandem that exists")
    return faults + ([] if re.search(r"^Hardware: \S", text, re.MULTILINE) else ["no `Hardware:`"])


# -- the repository ------------------------------------------------------------------------------------------

RESULTS = {path.name: path.read_text() for path in sorted((ROOT / "benchmarks/results").glob("*.md"))}


def texts(suffix: str) -> Iterator[tuple[Path, str]]:
    for name in tracked():
        if name.endswith(suffix) and "_pb2" not in name and name != "tests/repo/test_documents.py":
            yield ROOT / name, (ROOT / name).read_text()


def test_pages_name_and_link_only_what_exists() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path, text in texts(".md")
        for fault in [*wrong_names(text), *dead_links(text, path.parent)]
    ]
    assert not faults, "\n".join(faults)


def test_docstrings_and_comments_name_only_what_exists() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path, text in texts(".py")
        for fault in wrong_names(prose_of(text))
    ]
    assert not faults, "\n".join(faults)


def test_numbers_of_the_readme_are_in_the_pages_that_it_links_to() -> None:
    assert wrong_numbers((ROOT / "README.md").read_text(), RESULTS) == []


def test_no_ten_lines_of_results_stand_twice() -> None:
    assert repeated_lines(RESULTS) == []


@pytest.mark.parametrize("name", RESULTS)
def test_a_results_page_is_short_and_names_command_and_hardware(name: str) -> None:
    assert form_faults(RESULTS[name]) == []


# -- the checks find seeded faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see `benchmarks/engines.py`", "no file benchmarks/engines.py"),
        ("as dashboards.py does", "no file dashboards.py"),
        (
            "`python benchmarks/engine.py --loads 256:1`",
            "benchmarks/engine.py --loads 256:1: no option --loads",
        ),
        ('`make bench-engine BENCH="--loads 1"`', "benchmarks/engine.py --loads 1: no option --loads"),
        ("`make bench-all`", "no make target bench-all"),
        ("`tandem up --decoders 2`", "tandem up --decoders 2: no option --decoders"),
        ("`tandem bench serve --rates 2`", "no option --rates"),
        ("$ .venv/bin/tandem serve", "no command tandem serve"),
        ("`tandem up --set gateway.policy=x`", "no setting gateway.policy"),
        ("the gauge `tandem_queue_lengths`", "no metric tandem_queue_lengths"),
    ],
)
def test_a_name_of_nothing_is_found(text: str, fault: str) -> None:
    (found,) = wrong_names(text)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "`benchmarks/engine.py`, engine.py, `tandem_engine/engine.py`, tests/engine/test_*.py, /x/y.py",
        "`python benchmarks/engine.py --out new.md --only Tandem`, `tandem bench serve --rate 2`",
        "`tandem up --prefill 2 --set gateway.max-queue=16`, `tandem scaler --dry-run`, `make test`, make it",
        "`tandem_queue_length`, `tandem_e2e_seconds_bucket`, `tandem_kv_*`, the package tandem_engine",
    ],
)
def test_names_that_exist_are_no_faults(text: str) -> None:
    assert wrong_names(text) == []


def test_docstrings_and_comments_are_read_and_other_strings_are_not() -> None:
    source = '"""Of gone.py."""\nTEXT = """\nno.py\n"""\n#: As in lost.py.\nx = "other.py"\n'
    assert wrong_names(prose_of(source)) == ["no file gone.py", "no file lost.py"]


def test_dead_links_are_found() -> None:
    assert dead_links("[a](gone.png) [b](slos.md#objectives)", ROOT / "docs") == ["no file gone.png"]


def test_a_number_that_is_not_in_the_linked_page_is_found() -> None:
    link, pages = "([results](benchmarks/results/slo.md))", {"slo.md": "| 1072 | 0.988 | 27.4 |"}
    assert wrong_numbers(f"Of 1,072 .988 were in time, at 27.4/s {link}. Later 55.", pages) == []
    assert wrong_numbers(f"First 12. Of 1,072 11 were late {link}.", pages) == ["11 is not in slo.md"]


def test_ten_lines_that_stand_again_are_found() -> None:
    block = "\n".join(f"| {n} |" for n in range(10))
    assert repeated_lines({"a.md": block, "b.md": block[:-6]}) == []
    assert repeated_lines({"a.md": block, "b.md": f"# B\n{block}"}) == ["b.md, line 2: as a.md, line 1"]
    assert repeated_lines({"a.md": f"{block}\n\nx\n{block}"}) == ["a.md, line 12: as a.md, line 1"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Command: `make bench-slo`\nHardware: two cores\n" + "x\n" * 59, "more than 60 lines"),
        ("Command: some script\nHardware: two cores\n", "no `Command:`"),
        ("Command: `python benchmarks/gone.py`\nHardware: two cores\n", "no `Command:`"),
        ("Command: `make bench-slo`\n", "no `Hardware:`"),
    ],
)
def test_a_results_page_without_its_form_is_found(text: str, fault: str) -> None:
    (found,) = form_faults(text)
    assert found.startswith(fault)
