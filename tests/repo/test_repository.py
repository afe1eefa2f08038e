"""What must hold for the repository as a whole, whatever the code does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROTOS = sorted((ROOT / "proto/tandem_proto/v1").glob("*.proto"))
#: Directories of one particular machine; a document that names one is wrong everywhere else.
MACHINE_PATH = re.compile(r"(?<![\w.$}~])/(?:work|root|home|Users|mnt|tmp/dl)/[\w.-]+")


def tracked(*patterns: str) -> list[Path]:
    """Tracked files and those about to be (untracked, not ignored)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'proto'}",
            f"--plugin=protoc-gen-mypy={Path(sys.executable).parent / 'protoc-gen-mypy'}",
            f"--python_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            f"--mypy_out=quiet:{tmp_path}",
            *map(str, PROTOS),
        ],
        check=True,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "tandem_proto/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "proto/tandem_proto/v1").glob("*_pb2*.py*")}
    assert len(fresh) == 3 * len(PROTOS)
    stale = sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))
    assert not stale, f"run `make proto` and commit {stale}"


@pytest.mark.parametrize("script", sorted(PYPROJECT["project"]["scripts"]))
def test_console_script_is_installed_and_names_a_function(script: str) -> None:
    (entry,) = entry_points(group="console_scripts", name=script)
    assert entry.value == PYPROJECT["project"]["scripts"][script]
    assert (Path(sys.executable).parent / script).exists()
    assert callable(entry.load())


@pytest.mark.parametrize("name", ["kernels", "engine", "proto", "services", "common"])
def test_no_role_folder_is_importable(name: str) -> None:
    """transformers imports Hugging Face's `kernels` when it finds one; ours must not answer to that name."""
    outside = subprocess.run(
        [sys.executable, "-P", "-c", f"import importlib.util as u; print(u.find_spec({name!r}))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert outside.stdout.strip() == "None", f"a package named {name} shadows others: {outside.stdout}"


def test_transformers_takes_no_folder_of_ours_for_hugging_faces_kernels(tmp_path: Path) -> None:
    """Not even with the repository root on sys.path, where `kernels/` looks like a namespace package."""
    assert not (ROOT / "kernels/__init__.py").exists()
    probe = [sys.executable, "-c", "from transformers.utils import is_kernels_available as a; print(a())"]
    answers = [
        subprocess.run(probe, cwd=folder, capture_output=True, text=True, check=True).stdout
        for folder in (ROOT, tmp_path)
    ]
    assert answers[0] == answers[1]


def test_each_package_of_the_wheel_is_also_on_the_editable_path() -> None:
    build = PYPROJECT["tool"]["hatch"]["build"]
    roots = {str(Path(package).parent) for package in build["targets"]["wheel"]["packages"]}
    assert roots == set(build["dev-mode-dirs"])
    for package in build["targets"]["wheel"]["packages"]:
        assert (ROOT / package / "__init__.py").exists()
        assert not (ROOT / package).parent.joinpath("__init__.py").exists(), "a source root is no package"


@pytest.mark.parametrize(
    "target",
    [
        "venv",
        "serve",
        "test",
        "test-all",
        "bench-engine",
        "bench-slo",
        "bench-kernels",
        "observe",
        "observability",
        "lint",
        "types",
        "imports",
        "proto",
        "proto-check",
        "buf",
    ],
)
def test_make_knows_the_target(target: str) -> None:
    planned = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr


def test_ci_runs_only_targets_that_exist() -> None:
    (loop,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert "test" in loop.split()
    assert set(loop.split()) <= defined


def test_constraints_are_exact_and_cover_the_dependencies() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==([0-9]+!)?[A-Za-z0-9_.]+", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower(): line.split("==")[1] for line in lines}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    # The extra dev contains bench.
    wanted = [*project["dependencies"], *extras["bench"], *extras["dev"]]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[<>=~!\[; ]", want)[0]).lower() for want in wanted}
    # torch's CUDA build demands its own triton, so no single version suits every machine.
    assert names - set(pinned) - {"tandem"} == {"triton"}
    assert "+" not in pinned["torch"], "a local version exists on no index"


@pytest.mark.parametrize("path", tracked("*.md", "*.toml", "*.yaml", "Makefile", ".ci/run"), ids=str)
def test_no_document_names_a_path_of_one_machine(path: Path) -> None:
    assert not MACHINE_PATH.findall(path.read_text())


def test_the_machine_path_pattern_finds_what_it_is_for() -> None:
    assert MACHINE_PATH.findall("see /home/ann/models and /work/x") == ["/home/ann", "/work/x"]
    assert not MACHINE_PATH.findall("GET /v1/models, ~/.cache/tandem, $HOME/work/x, services/home/x")


def imported_names(path: Path) -> set[str]:
    """First components of absolute imports outside `if TYPE_CHECKING:` blocks."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_what_the_packages_import_is_declared_as_a_dependency() -> None:
    """A user's installation has no development packages."""
    normal = {re.sub(r"[-_.]+", "-", re.split(r"[<>=~!\[; ]", want)[0]).lower()
              for want in PYPROJECT["project"]["dependencies"]}  # fmt: skip
    # triton is an extra, imported only when needed; the others belong to a declared package.
    normal |= {"triton", "pydantic", "pydantic-core"}
    distributions = packages_distributions()
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    own = {Path(package).name for package in packages}
    undeclared = {
        (name, str(path.relative_to(ROOT)))
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for name in imported_names(path) - own - set(sys.stdlib_module_names)
        if not normal
        & {re.sub(r"[-_.]+", "-", found).lower() for found in distributions.get(name, ["<missing>"])}
    }
    assert not undeclared


#: Cached functions with arguments, and why these cannot fill the memory.
BOUNDED_CACHES = {
    "drafting/tandem_drafting/spans.py name": "request ids, which have 128 characters at most",
    "services/cli/tandem_cli/doctor/settings_checks.py _without_environment": "classes of settings",
}


def test_no_cache_keeps_what_callers_send() -> None:
    """functools' caches count entries, not bytes, and keep their keys: a caller's texts would stay in memory.
    Keep digests instead, as guide_checks.py does."""
    found = {
        f"{path.relative_to(ROOT)} {function.name}"
        for folder in ("core", "drafting", "engine", "services")
        for path in (ROOT / folder).rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.search(
            r"^(functools\.)?(lru_)?cache\b", "\n".join(map(ast.unparse, function.decorator_list)), re.M
        )
        and ast.unparse(function.args)
    }
    assert found == BOUNDED_CACHES.keys()


def test_the_engine_runs_without_triton() -> None:
    """`make serve` installs none beside a CPU build of torch."""
    modules = "tandem_engine.llm, tandem_prefill.main, tandem_decode.main"
    code = f"import sys; sys.modules['triton'] = None; import {modules}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
