"""Fetches files of a name on the hub into the cache of `huggingface_hub`, which also reads the token, and says in one
line each what stands in the way.
"""

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
"""The files of a model that are fetched beside its weights: what engines and tokenizers read."""
OTHER_MODEL_FILES = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "*/*.py")
"""Those that are not: copies of the model in other forms, and earlier checkpoints."""
_INDEX, _WEIGHTS = "model.safetensors.index.json", ".safetensors"
_OTHER_WEIGHTS = (GGUF, ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
SHOWN = 12
"""Digits of a commit that messages show."""
FIRST_SECONDS, LOG_SECONDS = 5.0, 30.0
"""Time until the first line on a download where there is no terminal, and between others."""

Say = Callable[[str], None]


class Snapshot(NamedTuple):
    """Files of a commit, in the cache.

    Attributes:
        path: their directory.
        commit: the commit.
        unreached: why the hub was not asked; empty where it was, or had not to be.
        file: the file of a model's weights, if it is of GGUF; else empty.
    """

    path: Path
    commit: str
    unreached: str = ""
    file: str = ""

    @property
    def model_path(self) -> Path:
        """The path of a model: the directory, or its file of GGUF."""
        return self.path / self.file


_fetched: dict[tuple[Any, ...], Snapshot] = {}


def fetch(
    name: HubName,
    key: str,
    files: Sequence[str],
    others: Sequence[str] = (),
    say: Say = log.debug,
    unreached: str = "",
) -> Snapshot:
    """Find the commit of a name, and bring those of its files into the cache that are not there.

    A process asks for a name once: a plan that is made anew, with another layout, is of the same commit.

    Args:
        name: the name.
        key: the config key or option that has it, for messages.
        files: patterns of the files that are wanted.
        others: patterns of those among them that are not.
        say: shows how far it is.
        unreached: why the hub is not to be asked; empty: it is.

    Raises:
        ModelError: they cannot be had; of a data set DataError.
    """
    from huggingface_hub import constants

    unreached = unreached or ("HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "")
    asked = (name[:3], tuple(files), constants.ENDPOINT, constants.HF_HUB_CACHE, unreached)
    if asked not in _fetched:
        _fetched[asked] = _fetch(name, key, files, others, say, unreached)
    return _fetched[asked]


def fetch_model(name: HubName, key: str, say: Say = log.debug) -> Snapshot:
    """Fetch a model: what describes it, and the weights that it is made of; arguments and errors as of `fetch`."""
    described = fetch(name, key, MODEL_FILES, OTHER_MODEL_FILES, say)
    pinned = name._replace(revision=described.commit)
    try:
        files = list_files(name, described.commit)
    except Exception:  # offline, of a cache that an older client made
        wanted = exactly([name.file]) if name.file else [f"*{_WEIGHTS}"]
        fetch(pinned, key, wanted, OTHER_MODEL_FILES, say, described.unreached)
        return described._replace(file=name.file or "")
    weights = _weights(files, described.path)
    if gguf := _choose_gguf(name, key, files, weights):
        weights = [gguf]
    if others := [file for file in files if file.endswith(_OTHER_WEIGHTS) and not weights]:
        raise ModelError(
            f"{key}: {name} has no weights in safetensors, which are wanted, only {listed(others, 3)}: "
            "load and save it with transformers, and set the path to the directory where that is"
        )
    if weights:
        fetch(pinned, key, exactly(weights), say=say, unreached=described.unreached)
    return described._replace(file=gguf)


def _choose_gguf(name: HubName, key: str, files: Sequence[str], weights: Sequence[str]) -> str:
    """Return the file of GGUF that a name means: the one that it names, else the only weights; empty if none.

    Raises:
        ModelError: it is not there, or which one is meant is not clear.
    """
    choices = [file for file in files if file.lower().endswith(GGUF)]
    if name.file:
        if name.file not in choices:
            raise ModelError(f"{key}: {name} is no GGUF file of that model; {nearest(name.file, choices)}")
        return name.file
    if weights or len(choices) < len([file for file in files if file.endswith(_OTHER_WEIGHTS)]):
        return ""
    if len(choices) > 1:
        raise ModelError(
            f"{key}: {name} has several GGUF files, and one is to be named, as {name._replace(file=choices[0])}: "
            f"{', '.join(choices)}"
        )
    return choices[0] if choices else ""


def _weights(files: Sequence[str], described: Path) -> list[str]:
    """Return the weights among a model's files: those that its index names, else its one file, else all there are."""
    try:
        shards = set(decode_json((described / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        shards = {"model.safetensors"}
    named = [file for file in files if file in shards]
    return named or [file for file in files if "/" not in file and file.endswith(_WEIGHTS)]


def list_files(name: HubName, commit: str) -> list[str]:
    """Return the paths of all files of a commit, as the cache has them listed, else as the hub has."""
    import huggingface_hub
    from huggingface_hub import HfApi, constants

    which = {"repo_type": name.kind, "revision": commit}
    if hasattr(huggingface_hub, "get_cached_repo_tree"):  # of huggingface_hub 2.4
        with suppress(huggingface_hub.errors.CachedRepoTreeNotFoundError):
            return [file.path for file in huggingface_hub.get_cached_repo_tree(name.repository, **which)]
    return HfApi(endpoint=constants.ENDPOINT).list_repo_files(name.repository, **which)


def exactly(files: Sequence[str]) -> list[str]:
    """Return patterns that these paths alone match."""
    return [glob.escape(file) for file in files]


def _fetch(name: HubName, key: str, files: Sequence[str], others: Sequence[str], say: Say, unreached: str) -> Snapshot:
    from huggingface_hub import HfApi, constants, snapshot_download

    which: dict[str, Any] = {"repo_id": name.repository, "repo_type": name.kind, "revision": name.revision or MAIN}
    try:
        if not unreached and not name.names_commit:
            say(f"Asking {constants.ENDPOINT} for {name}")
            try:
                HfApi(endpoint=constants.ENDPOINT).repo_info(**which, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except Exception as error:  # of the HTTP client, whose package differs with the version
                if _is_refusal(error):
                    raise
                unreached = _why(error)
        logging.getLogger(snapshot_download.__module__).setLevel(logging.ERROR)  # it warns where no file is wanted
        path = snapshot_download(
            **which,
            allow_patterns=list(files),
            ignore_patterns=list(others),
            endpoint=constants.ENDPOINT,
            local_files_only=bool(unreached),
            tqdm_class=_progress(name, say),
        )
    except Exception as error:
        raised = ModelError if name.kind == "model" else DataError
        raise raised(f"{key}: {_problem(name, error, unreached)}") from error
    return Snapshot(Path(path), Path(path).name, unreached)


def _is_refusal(error: Exception) -> bool:
    """Return whether an error is an answer of the hub, or of the client to the name, that will stay as it is."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code < 500 and error.response.status_code != 429
    return isinstance(error, HFValidationError)


def _why(error: BaseException) -> str:
    """Return why the hub gives no answer."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answers {error.response.status_code}"
    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {first_line(error)})"


def _problem(name: HubName, error: Exception, unreached: str) -> str:
    """Return in a line why files of a name cannot be had, what of it is cached, and what to do.

    Args:
        error: what the client raised.
        unreached: why the hub was not asked; empty where it was.
    """
    from huggingface_hub import constants, errors

    repository, what = name.repository, "model" if name.kind == "model" else "data set"
    page = f"{constants.ENDPOINT}/{'' if name.kind == 'model' else 'datasets/'}{repository}"
    cached = _cached(name)
    command = f"hf download {repository}{'' if name.kind == 'model' else ' --repo-type dataset'}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the {what} {repository} is gated: ask for access at {page}, and set HF_TOKEN to a token of that account "
            f"({_token_words()}); {cached}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        revision = name.revision or MAIN
        return f"the {what} {repository} has no revision {revision!r} on the hub{_other_revisions(name)}; {cached}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name} is no path here, and the hub ({constants.ENDPOINT}) has no {what} {repository}, or a private one"
            f"{_alike(name)}: check the name, or set HF_TOKEN to a token that may read it ({_token_words()}); {cached}"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{name} is no path here, and cannot be a name on the hub: {first_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = unreached or _why(error.__cause__ or error)
        part = ", in part" if hasattr(error, "snapshot_path") else ""
        return (
            f"{name} is no path here, and of the hub it cannot be had: {why}; {cached}{part}. Fetch it where there is "
            f"a network (`{command}`; the cache is in HF_HOME), or set the path to a directory or file"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refuses {name}: {' '.join(str(error).split())} ({_token_words()}); {cached}"
    if isinstance(error, OSError) and error.errno is not None:
        where = constants.HF_HUB_CACHE
        return f"{name} cannot be written to {where} ({os.strerror(error.errno)}); HF_HOME sets another cache"
    return (
        f"{name} was not fetched whole ({type(error).__name__}: {first_line(error)}); what has come stays in the "
        "cache, and the same command goes on from there"
    )


def _token_words() -> str:
    from huggingface_hub import get_token

    return "the token in use is not enough" if get_token() else "no token is set"


def _cached(name: HubName) -> str:
    """Return what of a name is cached."""
    from huggingface_hub import constants

    folder = _folder(name)
    commits = [path.name for path in sorted(folder.glob("snapshots/*"))]
    refs = {
        path.read_text().strip(): path.relative_to(folder / "refs").as_posix()
        for path in sorted(folder.glob("refs/**/*"))
        if path.is_file()
    }
    words = [f"{refs[commit]} ({commit})" if commit in refs else commit for commit in commits]
    return f"cached of it: {listed(words, 3)}" if words else f"nothing of it is cached in {constants.HF_HUB_CACHE}"


def _alike(name: HubName) -> str:
    """Return the end of a sentence: the cached name that is most like this one, if one is."""
    from huggingface_hub import constants

    prefix = f"{name.kind}s--"
    names = [path.name.removeprefix(prefix) for path in Path(constants.HF_HUB_CACHE).glob(f"{prefix}*--*")]
    others = [other.replace("--", "/", 1) for other in names]
    close = difflib.get_close_matches(name.repository, [other for other in others if other != name.repository], n=1)
    return f" (cached is {close[0]})" if close else ""


def _other_revisions(name: HubName) -> str:
    """Return the end of a sentence: which branches and tags there are."""
    from huggingface_hub import HfApi, constants

    if name.names_commit:
        return ""
    with suppress(Exception):  # it is only a hint
        refs = HfApi(endpoint=constants.ENDPOINT).list_repo_refs(name.repository, repo_type=name.kind)
        return f": {nearest(name.revision or MAIN, [ref.name for ref in (*refs.branches, *refs.tags)])}"
    return ""


def _folder(name: HubName) -> Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type=name.kind)


def _progress(name: HubName, say: Say) -> type:
    """Return the class of the client's bars: a line on a terminal; where there is none, one now and then in a log."""
    from huggingface_hub.utils import tqdm

    shows, due = sys.stderr.isatty(), [time.monotonic() + FIRST_SECONDS]

    class Line(tqdm):
        disable: bool

        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.unit == "B" and self.n:
                done, all_ = (self.format_sizeof(number) for number in (self.n, self.total or self.n))
                words = f"Fetching {name.repository}: {done}B of {all_}B"
                if shows:
                    say(words)
                elif time.monotonic() > due[0]:
                    due[0] = time.monotonic() + LOG_SECONDS
                    log.warning("%s", words)
            return True

        def clear(self, nolock: bool = False) -> None:
            """Leave the line, which is not of tqdm."""

        def close(self) -> None:
            if not self.disable:
                self.disable = True
                self._decr_instances(self)

    return Line
