"""Fetches the files of a name on the hub into the cache of `huggingface_hub`, which also finds the access token."""

from __future__ import annotations

import difflib
import glob
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import DataError, ModelError, first_line, listed, nearest
from enginehouse.jsontext import decode_json
from enginehouse_rl.hub.names import GGUF, MAIN, HubName

log = logging.getLogger(__name__)

MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""Patterns of the files that are fetched besides a model's weights: the files that engines and tokenizers read."""
OTHER_MODEL_FILES = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "*/*.py")
"""Patterns of files that are not fetched: copies of the model in other formats, and earlier checkpoints."""
_INDEX, _WEIGHTS = "model.safetensors.index.json", ".safetensors"
_OTHER_WEIGHTS = (GGUF, ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
SHOWN = 12
"""Number of digits of a commit in messages."""
FIRST_SECONDS, LOG_SECONDS = 5.0, 30.0
"""Without a terminal: seconds until the first log line about a download, and seconds between later lines."""

Say = Callable[[str], None]


class Snapshot(NamedTuple):
    """Files of a commit, in the cache.

    Attributes:
        unreached: reason why the hub was not asked; empty if it was asked, or need not be asked.
        file: the GGUF file with a model's weights; empty for other models.
    """

    path: Path
    commit: str
    unreached: str = ""
    file: str = ""

    @property
    def model_path(self) -> Path:
        """The path of a model: the directory, or its GGUF file."""
        return self.path / self.file


_fetched: dict[tuple[Any, ...], Snapshot] = {}


def fetch(
    name: HubName, key: str, files: Sequence[str], others: Sequence[str] = (), say: Say = log.debug, unreached: str = ""
) -> Snapshot:
    """Find the commit of a name, and fetch its files unless they are in the cache.

    A process asks for a name only once, so that a second plan, with another layout, gets the same commit.

    Args:
        key: the config key or option that has the name, for messages.
        files: patterns of the files to fetch.
        others: patterns of files that are not fetched, even if they match `files`.
        unreached: reason not to ask the hub; empty: ask it.

    Raises:
        ModelError: the files of a model cannot be fetched.
        DataError: the files of a data set cannot be fetched.
    """
    from huggingface_hub import constants

    unreached = unreached or ("HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "")
    request = (name[:3], tuple(files), constants.ENDPOINT, constants.HF_HUB_CACHE, unreached)
    if request not in _fetched:
        _fetched[request] = _fetch(name, key, files, others, say, unreached)
    return _fetched[request]


def fetch_model(name: HubName, key: str, say: Say = log.debug) -> Snapshot:
    """Fetch the weights of a model, and the files that engines and tokenizers read. Takes the arguments of `fetch` and
    raises its errors."""
    description = fetch(name, key, MODEL_FILES, OTHER_MODEL_FILES, say)
    pinned = name._replace(revision=description.commit)
    try:
        files = list_files(name, description.commit)
    except Exception:  # offline, from a cache that an older client made
        patterns = escape_patterns([name.file]) if name.file else [f"*{_WEIGHTS}"]
        fetch(pinned, key, patterns, OTHER_MODEL_FILES, say, description.unreached)
        return description._replace(file=name.file or "")
    weights = _choose_weights(files, description.path)
    if gguf := _choose_gguf(name, key, files, weights):
        weights = [gguf]
    if other_weights := [file for file in files if file.endswith(_OTHER_WEIGHTS) and not weights]:
        raise ModelError(
            f"{key}: {name} has no weights in safetensors, only {listed(other_weights, 3)}: "
            "load and save it with transformers, and set the path to the directory where it is saved"
        )
    if weights:
        fetch(pinned, key, escape_patterns(weights), say=say, unreached=description.unreached)
    return description._replace(file=gguf)


def _choose_gguf(name: HubName, key: str, files: Sequence[str], weights: Sequence[str]) -> str:
    """Return the GGUF file that a name refers to: the file in the name, or the model's only weights; empty if none.

    Raises:
        ModelError: the file does not exist, or the name is ambiguous.
    """
    choices = [file for file in files if file.lower().endswith(GGUF)]
    if name.file:
        if name.file not in choices:
            raise ModelError(f"{key}: {name} is no GGUF file of that model. {nearest(name.file, choices)}")
        return name.file
    if weights or len(choices) < len([file for file in files if file.endswith(_OTHER_WEIGHTS)]):
        return ""
    if len(choices) > 1:
        raise ModelError(
            f"{key}: {name} has several GGUF files; name one of them, such as {name._replace(file=choices[0])}: "
            f"{', '.join(choices)}"
        )
    return choices[0] if choices else ""


def _choose_weights(files: Sequence[str], folder: Path) -> list[str]:
    """Return the weights among a model's files: the files in its index, or `model.safetensors`, or all weights."""
    try:
        shards = set(decode_json((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        shards = {"model.safetensors"}
    indexed = [file for file in files if file in shards]
    return indexed or [file for file in files if "/" not in file and file.endswith(_WEIGHTS)]


def list_files(name: HubName, commit: str) -> list[str]:
    """Return the paths of all files of a commit, from the cache if it has the list, otherwise from the hub."""
    import huggingface_hub
    from huggingface_hub import HfApi, constants

    options = {"repo_type": name.kind, "revision": commit}
    if hasattr(huggingface_hub, "get_cached_repo_tree"):  # since huggingface_hub 2.4
        with suppress(huggingface_hub.errors.CachedRepoTreeNotFoundError):
            return [file.path for file in huggingface_hub.get_cached_repo_tree(name.repository, **options)]
    return HfApi(endpoint=constants.ENDPOINT).list_repo_files(name.repository, **options)


def escape_patterns(files: Sequence[str]) -> list[str]:
    """Return patterns that match exactly these paths."""
    return [glob.escape(file) for file in files]


def _fetch(name: HubName, key: str, files: Sequence[str], others: Sequence[str], say: Say, unreached: str) -> Snapshot:
    from huggingface_hub import HfApi, constants, snapshot_download

    repository: dict[str, Any] = {"repo_id": name.repository, "repo_type": name.kind, "revision": name.revision or MAIN}
    try:
        if not unreached and not name.names_commit:
            say(f"Asking {constants.ENDPOINT} for {name}")
            try:
                HfApi(endpoint=constants.ENDPOINT).repo_info(**repository, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except Exception as error:  # from the HTTP client; its package depends on the version
                if _is_refusal(error):
                    raise
                unreached = _explain_unreached(error)
        logging.getLogger(snapshot_download.__module__).setLevel(logging.ERROR)  # it warns where no file is wanted
        path = snapshot_download(
            **repository,
            allow_patterns=list(files),
            ignore_patterns=list(others),
            endpoint=constants.ENDPOINT,
            local_files_only=bool(unreached),
            tqdm_class=_make_bar(name, say),
        )
    except Exception as error:
        raised = ModelError if name.kind == "model" else DataError
        raise raised(f"{key}: {_describe_error(name, error, unreached)}") from error
    return Snapshot(Path(path), Path(path).name, unreached)


def _is_refusal(error: Exception) -> bool:
    """True if the hub or the client rejects the name, so that another attempt would fail too."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code < 500 and error.response.status_code != 429
    return isinstance(error, HFValidationError)


def _explain_unreached(error: BaseException) -> str:
    """Explain why the hub does not answer."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answers {error.response.status_code}"
    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {first_line(error)})"


def _describe_error(name: HubName, error: Exception, unreached: str) -> str:
    """Describe in one line why the files of a name cannot be fetched, which revisions are cached, and what to do.
    `unreached` is the reason why the hub was not asked; empty if it was asked."""
    from huggingface_hub import constants, errors

    repository, kind = name.repository, "model" if name.kind == "model" else "data set"
    page = f"{constants.ENDPOINT}/{'' if name.kind == 'model' else 'datasets/'}{repository}"
    cached = _describe_cached(name)
    command = f"hf download {repository}{'' if name.kind == 'model' else ' --repo-type dataset'}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the {kind} {repository} is gated: ask for access at {page}, and set HF_TOKEN to a token of that account "
            f"({_describe_token()}); {cached}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        revision = name.revision or MAIN
        return f"the {kind} {repository} has no revision {revision!r} on the hub{_suggest_revision(name)}; {cached}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name} is no local path, and the hub ({constants.ENDPOINT}) has no public {kind} {repository}"
            f"{_suggest_cached(name)}: check the name, or set HF_TOKEN to a token that may read a private {kind} "
            f"({_describe_token()}); {cached}"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{name} is no local path, and cannot be a name on the hub: {first_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        reason = unreached or _explain_unreached(error.__cause__ or error)
        part = ", but only in part" if hasattr(error, "snapshot_path") else ""
        return (
            f"{name} is no local path, and cannot be fetched from the hub: {reason}; {cached}{part}. Fetch it on a "
            f"machine with a network (`{command}`; the cache is in HF_HOME), or set the path to a directory or file"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refuses {name}: {' '.join(str(error).split())} ({_describe_token()}); {cached}"
    if isinstance(error, OSError) and error.errno is not None:
        cache = constants.HF_HUB_CACHE
        return f"{name} cannot be written to {cache} ({os.strerror(error.errno)}); HF_HOME sets another cache"
    return (
        f"{name} was not downloaded completely ({type(error).__name__}: {first_line(error)}); the finished part stays "
        "in the cache, and the same command continues from there"
    )


def _describe_token() -> str:
    from huggingface_hub import get_token

    return "the token in use gives no access" if get_token() else "no token is set"


def _describe_cached(name: HubName) -> str:
    """Describe the cached revisions of a name."""
    from huggingface_hub import constants

    folder = _find_folder(name)
    commits = [path.name for path in sorted(folder.glob("snapshots/*"))]
    refs = {
        path.read_text().strip(): path.relative_to(folder / "refs").as_posix()
        for path in sorted(folder.glob("refs/**/*"))
        if path.is_file()
    }
    words = [f"{refs[commit]} ({commit})" if commit in refs else commit for commit in commits]
    return f"cached revisions: {listed(words, 3)}" if words else f"no revision is cached in {constants.HF_HUB_CACHE}"


def _suggest_cached(name: HubName) -> str:
    """Return the most similar name in the cache as the end of a sentence; empty if no name is similar."""
    from huggingface_hub import constants

    prefix = f"{name.kind}s--"
    names = [path.name.removeprefix(prefix) for path in Path(constants.HF_HUB_CACHE).glob(f"{prefix}*--*")]
    names = [name_cached.replace("--", "/", 1) for name_cached in names]
    close = difflib.get_close_matches(
        name.repository, [name_cached for name_cached in names if name_cached != name.repository], n=1
    )
    return f" (the cache has {close[0]})" if close else ""


def _suggest_revision(name: HubName) -> str:
    """Return the most similar branch or tag as the end of a sentence."""
    from huggingface_hub import HfApi, constants

    if name.names_commit:
        return ""
    with suppress(Exception):  # it is only a hint
        refs = HfApi(endpoint=constants.ENDPOINT).list_repo_refs(name.repository, repo_type=name.kind)
        return f". {nearest(name.revision or MAIN, [ref.name for ref in (*refs.branches, *refs.tags)])}"
    return ""


def _find_folder(name: HubName) -> Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type=name.kind)


def _make_bar(name: HubName, say: Say) -> type:
    """Return the class of the client's progress bars: a line on a terminal, otherwise occasional lines in the log."""
    from huggingface_hub.utils import tqdm

    shows, next_line = sys.stderr.isatty(), [time.monotonic() + FIRST_SECONDS]

    class Line(tqdm):
        disable: bool

        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.unit == "B" and self.n:
                loaded, all_ = (self.format_sizeof(number) for number in (self.n, self.total or self.n))
                words = f"Fetching {name.repository}: {loaded}B of {all_}B"
                if shows:
                    say(words)
                elif time.monotonic() > next_line[0]:
                    next_line[0] = time.monotonic() + LOG_SECONDS
                    log.warning("%s", words)
            return True

        def clear(self, nolock: bool = False) -> None:
            """Leave the line as it is, because tqdm did not write it."""

        def close(self) -> None:
            if not self.disable:
                self.disable = True
                self._decr_instances(self)

    return Line
