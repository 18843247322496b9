"""Fetches the models and data sets that a config names on the Hugging Face hub, before anything else is checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from enginehouse.errors import ConfigError
from enginehouse_rl.benchmarks.names import FILES, check_installed, list_benchmarks
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.config.schema import AnyConfig, Config
from enginehouse_rl.hub.names import MAIN, HubName
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.roles import list_auxiliaries

if TYPE_CHECKING:
    from enginehouse_rl.hub.snapshots import Snapshot

RECORDED = "hub"
"""The key in `run.json` that holds the commits."""
_Field = Literal["model", "train", "validation"]
_Text = tuple[_Field, str]
"""The field of the config, and the text in it."""


class HubPart(Part[AnyConfig]):
    """Replaces names on the hub by paths, for all parts that settle later.

    Attributes:
        written: the config as a run records it, with the commit in each name.
        entries: the entry of each name, for `run.json`.
        benchmarks: the directory with the data set of each benchmark, by the benchmark's name.
    """

    written: AnyConfig
    entries: tuple[Mapping[str, Any], ...] = ()
    benchmarks: Mapping[str, Path] = MappingProxyType({})

    def settle(self) -> None:
        self.written = self.config
        self._settle_names()
        if isinstance(self.config, Config) and self.config.evaluation.benchmarks:
            self._settle_benchmarks(self.config.evaluation.benchmarks)
            self.findings.raise_problems(self.run.source)

    def _settle_names(self) -> None:
        """Fetch the files of all hub names that the config has in place of paths."""
        names: dict[_Text, tuple[_Place, HubName]] = {}
        for place in _iterate_places(self.config, self.run.model_key):
            if name := HubName.parse(place.text, "model" if place.field == "model" else "dataset"):
                names.setdefault((place.field, place.text), (place, name))
        if not names:
            return
        former = self._read_former()
        fetched: dict[_Text, _Fetched] = {}
        for text, (place, name) in names.items():
            with self.findings.collecting():
                fetched[text] = self._fetch(place, name, former.get(place.key))
        self.findings.raise_problems(self.run.source)  # nothing more can be said of a model that is not here
        self.entries = tuple(copy.entry for copy in fetched.values())
        self.run.short_paths |= {str(copy.directory): copy.short for copy in fetched.values()}
        for note in dict.fromkeys(copy.note for copy in fetched.values() if copy.note):
            self.note(note)
        self.run.config = self._replace({text: copy.paths for text, copy in fetched.items()})
        self.written = self._replace({text: (copy.pinned,) for text, copy in fetched.items()})
        self.findings.raise_problems(self.run.source)

    def _settle_benchmarks(self, texts: Sequence[str]) -> None:
        """Fetch the data sets of benchmarks, and pin their commits. A resumed run keeps its commits."""
        from enginehouse_rl.hub.snapshots import fetch

        names, former, pinned = list_benchmarks(texts), self._read_former(), list[str]()
        with self.findings.collecting():
            check_installed(names)
        self.findings.raise_problems(self.run.source)
        for benchmark in names:
            key, repository = f"evaluation.benchmarks.{benchmark.name}", benchmark.benchmark.repository
            began = former.get(key, {})
            revision = benchmark.revision
            if began and revision in (None, began["revision"]):
                revision = began["commit"]
            name = HubName("dataset", repository, revision)
            with self.findings.collecting():
                snapshot = fetch(name, key, FILES, say=self.findings.doing)
                if note := _describe_unreached(name, snapshot):
                    self.note(note)
                entry = {"revision": benchmark.revision or MAIN, "commit": snapshot.commit}
                self.entries = (*self.entries, {"key": key, "name": repository, **entry})
                self.benchmarks = {**self.benchmarks, benchmark.name: snapshot.path}
                pinned.append(str(benchmark._replace(revision=snapshot.commit)))
        self.written = _set(self.written, ["evaluation", "benchmarks"], pinned)

    def facts(self) -> Iterable[Fact]:
        if self.entries:
            yield "hub", ", ".join(dict.fromkeys(f"{entry['name']} at {entry['commit']}" for entry in self.entries))

    def _read_former(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the hub entries of the run that is resumed, by their config keys."""
        entries = read_record(Path(self.config.run.directory)).get(RECORDED) if self.run.resume else None
        return {entry["key"]: entry for entry in entries} if isinstance(entries, list) else {}

    def _fetch(self, place: _Place, name: HubName, former: Mapping[str, Any] | None) -> _Fetched:
        """Fetch the files of a name. A resumed run keeps the commit that it began with.

        Raises:
            UserError: the name cannot be fetched, or names another commit than the resumed run.
        """
        from enginehouse_rl.hub.snapshots import SHOWN, fetch_model
        from enginehouse_rl.hub.splits import fetch_split

        revision = name.revision or MAIN
        began = former["commit"] if former is not None and former["name"] == name.repository else None
        if began and name.revision in (None, former and former["revision"]):
            name = name._replace(revision=began)
        paths: Sequence[str]
        if place.field == "model":
            snapshot = fetch_model(name, place.key, self.findings.doing)
            full = name._replace(file=snapshot.file or None)
            paths = [str(snapshot.model_path)]
        else:
            usual = "train" if place.field == "train" else None
            full, snapshot, paths = fetch_split(name, place.key, usual, self.findings.doing)
        if began and snapshot.commit != began and place.field != "validation":
            raise ConfigError(
                f"--resume: {place.key} is {place.text}, which is the commit {snapshot.commit[:SHOWN]}, but the run "
                f"began with {began[:SHOWN]}: leave the revision out, or start a new run in another directory"
            )
        return _Fetched(
            directory=snapshot.path,
            short=f"{name.repository}@{snapshot.commit[:SHOWN]}",
            paths=paths,
            pinned=str(full._replace(revision=snapshot.commit)),
            note=_describe_unreached(name, snapshot),
            entry={
                "key": place.key,
                "name": name.repository,
                "revision": revision,
                "commit": snapshot.commit,
                **({"config": full.config, "split": full.split} if place.field != "model" else {}),
                **({"file": full.file} if full.file else {}),
            },
        )

    def _replace(self, paths: Mapping[_Text, Sequence[str]]) -> Any:
        """Return the config with some of its texts replaced by paths."""

        def find_paths(field: _Field, text: str) -> Sequence[str]:
            return paths.get((field, text), (text,))

        def take_single_path(field: _Field, text: str, key: str) -> str:
            files = find_paths(field, text)
            if len(files) > 1:
                self.refuse(
                    f"{key}: {text} is stored as {len(files)} files, but a name or weight must belong to a single "
                    "file: join the files with `datasets`, or list them without weights"
                )
            return files[0]

        config: Any = self.config
        config = replace_models(
            config, {key: find_paths("model", path)[0] for key, path in map_model_paths(config).items()}
        )
        fields: tuple[_Field, ...] = ("train", "validation")
        for field in fields:
            value, key = getattr(config.data, field), f"data.{field}"
            if isinstance(value, Mapping) and field == "train":
                value = {take_single_path(field, text, key): weight for text, weight in value.items()}
            elif isinstance(value, Mapping):
                value = {name: take_single_path(field, text, f"{key}.{name}") for name, text in value.items()}
            elif isinstance(value, str) and field == "validation" and hasattr(config.data, "validation_files"):
                value = take_single_path(field, value, key)
            elif value:
                listed = [value] if isinstance(value, str) else value
                files = [file for text in listed for file in find_paths(field, text)]
                value = files[0] if isinstance(value, str) and len(files) == 1 else files
            config = _set(config, ["data", field], value) if value != getattr(config.data, field) else config
        return config


class _Place(NamedTuple):
    """A place in a config where a name on the hub may stand."""

    key: str
    text: str
    field: _Field


class _Fetched(NamedTuple):
    """The files of a name on the hub.

    Attributes:
        short: the name that replaces the directory in the plan's text.
        paths: the paths that replace the name in the config.
        pinned: the name with its commit.
        note: a note for the plan; may be empty.
        entry: the entry of `run.json`.
    """

    directory: Path
    short: str
    paths: Sequence[str]
    pinned: str
    note: str
    entry: Mapping[str, Any]


def _describe_unreached(name: HubName, snapshot: Snapshot) -> str:
    """If the hub could not be asked, describe which cached commit is used; otherwise return an empty text."""
    if name.names_commit or not snapshot.unreached:
        return ""
    from enginehouse_rl.hub.snapshots import SHOWN

    return f"{snapshot.unreached}: {name} is taken to be the commit {snapshot.commit[:SHOWN]}, which is cached"


def _iterate_places(config: AnyConfig, model_key: str) -> Iterator[_Place]:
    """Yield the places in a config where a name on the hub may stand, with their keys for messages."""
    for key, path in map_model_paths(config).items():
        yield _Place(model_key if key == "model.path" else key, path, "model")
    fields: tuple[_Field, ...] = ("train", "validation")
    for field in fields:
        value = getattr(config.data, field) or []
        if isinstance(value, str):
            yield _Place(f"data.{field}", value, field)
        elif isinstance(value, Mapping) and field == "validation":
            yield from (_Place(f"data.{field}.{name}", text, field) for name, text in value.items())
        else:
            yield from (_Place(f"data.{field}[{number}]", text, field) for number, text in enumerate(value))


def map_model_paths(config: AnyConfig) -> dict[str, str]:
    """Return the path of each model in a config, by its config key."""
    paths = {f"{name}.path": section.path for name, section in list_auxiliaries(config).items() if section.path}
    return {"model.path": config.model.path, **paths}


def replace_models(config: Any, paths: Mapping[str, str]) -> Any:
    """Return a config with other model paths, given by their config keys."""
    for key, path in paths.items():
        config = _set(config, key.split("."), path)
    return config


def _set(section: Any, key: Sequence[str], value: Any) -> Any:
    """Return a copy of a section, or of a mapping of sections, with one value changed."""
    first, *inner = key
    current = section[first] if isinstance(section, Mapping) else getattr(section, first)
    changed = _set(current, inner, value) if inner else value
    return {**section, first: changed} if isinstance(section, Mapping) else section.model_copy(update={first: changed})
