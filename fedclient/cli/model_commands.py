"""Commands for the finished model, offline: evaluate, predict, plot, export and verify-model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attune.common.command_group import FILE, PATH
from attune.common.durable import check_file, replaced
from attune.common.errors import AttuneError, SettingError
from attune.common.text import csv_cell, listed
from attune.fedclient.cli.shared import ModelPlace, allow_model_option, data_option, model_place
from attune.fedclient.table_options import mapping_options, read_options, table_options

if TYPE_CHECKING:
    from attune.fedclient.data.new_samples import NewSamples
    from attune.fedclient.model.light_model import FinishedModel
    from attune.fedclient.model.model_info import ModelInfo
    from attune.fedclient.read_options import ReadOptions


@click.command()
@data_option("Its test part is used. A quoted pattern evaluates each shard's own model.", required=True)
@model_place
@table_options
@allow_model_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(data: tuple[str, ...], place: ModelPlace, allow_models: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Measure the finished model's accuracy on a shard's test part, offline."""
    table = read_options(given)
    from attune.fedclient import shards
    from attune.fedclient.data import findings
    from attune.fedclient.model import scores

    if shards.is_fleet(data):
        sys.exit(_evaluate_fleet(data, place, as_json, table, allow_models))
    with findings.heard() as strange:
        where = place.home_of(Path(data[0]))
        result = scores.score_on_test_part(where, Path(data[0]), table, allow_models)
    findings.show({"": strange}, err=True)
    click.echo(json.dumps(asdict(result)) if as_json else result)


def _evaluate_fleet(
    data: tuple[str, ...], place: ModelPlace, as_json: bool, table: ReadOptions, allow_models: tuple[str, ...]
) -> int:
    """Print the accuracy on each shard, or the reason why there is none, and the mean. Return the exit code."""
    from attune.fedclient import shards
    from attune.fedclient.data import findings
    from attune.fedclient.model import scores

    paths = shards.expand(data)
    labels = shards.labels(paths)
    results, code, strange = [], 0, {}
    for path, label in zip(paths, labels, strict=True):
        try:
            where = place.home_of(path, label)
            with findings.heard() as strange[label]:
                results.append(scores.score_on_test_part(where, path, table, allow_models))
        except AttuneError as error:
            click.echo(f"fedclient: {label}: {error}", err=True)
            code = code or error.exit_code
            continue
        if not as_json:
            click.echo(results[-1])
    findings.show(strange, err=True)
    if results and as_json:
        click.echo(json.dumps({"clients": [asdict(result) for result in results]} | scores.mean_scores(results)))
    elif results:
        mean = scores.mean_scores(results)
        over_samples = f"{mean['over_samples']:.4f} over all test samples"
        click.echo(f"mean of {len(results)} devices: {results[0].metric} {mean['accuracy']:.4f} ({over_samples})")
    return code


@click.command()
@click.option(
    "--data",
    required=True,
    multiple=True,
    metavar="NEW",
    help="An .npz with x, or a table; of an image model also image files (repeat it, or quote a pattern) and folders of them.",
)
@click.option(
    "--out",
    type=FILE,
    required=True,
    help="A CSV file: index, label; index, position, label of positions; index, A, B of targets or labels A and B; or log "
    "hazard. Of images their file is the last column. Of pixels: an .npz with y.",
)
@click.option("--probabilities", is_flag=True, help="Add p(A), the probability of each class or label A.")
@click.option(
    "--intervals", type=PATH, metavar="SHARD",
    help="Of numbers: add `A low` and `A high`, between which 95 % lie, by the errors on this shard's test part.",
)  # fmt: skip
@click.option("--id", "id_column", default="", metavar="COLUMN", help="Of a table: copy this column, as the last one.")
@model_place
@mapping_options
@allow_model_option
def predict(
    data: tuple[str, ...],
    out: Path,
    probabilities: bool,
    intervals: Path | None,
    id_column: str,
    place: ModelPlace,
    allow_models: tuple[str, ...],
    **mapping: Any,
) -> None:
    """Label new samples with the finished model, offline."""
    import csv

    from attune.fedclient.data import findings
    from attune.fedclient.data.new_samples import new_samples
    from attune.fedclient.model.light_model import load_model
    from attune.fedclient.model.scores import half_widths
    from attune.fedclient.read_options import ReadOptions

    check_file(out)
    where = place.home_of(None)
    loaded = load_model(where.model, allow_models)
    info, options, who = loaded.info, ReadOptions.of(**mapping), ", ".join(data)
    arrays = info.model.labels_pixels or info.task == "custom"
    if arrays != (out.suffix.lower() == ".npz"):
        raise SettingError(f"--out {out}: what this model predicts is written to {'an .npz' if arrays else 'a CSV'} file")
    samples = new_samples(data, info.model, info.column_names, info.missing_words, info.table_schema, options, id_column)
    unseen = f"training here knew no value of {listed(loaded.unseen)}, so they change no prediction"
    findings.show({"": [*samples.notes, *([unseen] if loaded.unseen else [])]}, err=True)
    if arrays:
        write_arrays_of(out, loaded, samples, probabilities, who)
        return
    labels = loaded.predict(samples.x, who)
    rows = PredictionLines(info, labels, samples.named_by, samples.names)
    if probabilities:
        rows.shares = loaded.probabilities(samples.x, who).tolist()
    if intervals is not None:
        rows.half_widths = half_widths(loaded, intervals, options, where.held_rows()).tolist()
    try:
        special = out.exists() and not out.is_file()  # such as /dev/stdout
        with (
            nullcontext(out) if special else replaced(out, durable=False) as beside,
            beside.open("w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file).writerows(map(csv_cell, line) for line in rows)
    except OSError as error:
        raise SettingError(f"cannot write {out}: {error.strerror}") from None
    what = "labelled sequences" if info.model.per_position else "labels" if info.task == "classes" else "rows"
    click.echo(f"{len(labels)} {what} in {out}")


def write_arrays_of(out: Path, model: FinishedModel, samples: NewSamples, probabilities: bool, who: str) -> None:
    """Write what is predicted as y of a shard, (N, ...), what tells samples apart as `names`, and `probabilities` if wanted."""
    import numpy as np

    from attune.fedclient.data.arrays import write_arrays

    arrays = {"y": np.array(model.predict(samples.x, who))}
    arrays |= {"names": np.array(samples.names)} if len(samples.names) else {}
    arrays |= {"probabilities": model.probabilities(samples.x, who)} if probabilities else {}
    try:
        write_arrays(out, arrays)
    except OSError as error:
        raise SettingError(f"cannot write {out}: {error.strerror}") from None
    click.echo(f"{len(samples.x)} {'label images' if model.info.model.labels_pixels else 'predictions'} in {out}")


@dataclass
class PredictionLines:
    """Lines of the file of predictions: a heading, then a line for each sample, or for each position of each sample.

    Attributes:
        info: The model.
        labels: What it predicts of each sample.
        named_by: Heading of the last column; empty: there is none.
        names: Its cells.
        shares: Probabilities of each sample's classes or labels, or of each of its positions; None: they were not asked for.
        half_widths: How far the interval of each number reaches to both sides; None: they were not asked for.
    """

    info: ModelInfo
    labels: Sequence[Any]
    named_by: str
    names: Sequence[Any]
    shares: Sequence[Any] | None = None
    half_widths: Sequence[float] | None = None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        outputs = list(map(str, self.info.classes))
        values = ("label",) if self.info.task == "classes" else ("log hazard",) if self.info.task == "survival" else outputs
        positions = ("position",) if self.info.model.per_position else ()
        more = [] if self.shares is None else [f"p({name})" for name in outputs]
        more += [] if self.half_widths is None else [f"{name} {side}" for name in outputs for side in ("low", "high")]
        yield "index", *positions, *values, *more, *([self.named_by] if self.named_by else [])
        for index, label in enumerate(self.labels):
            name, shares = self.names[index : index + 1], None if self.shares is None else self.shares[index]
            if positions:
                for position, one in enumerate(label):
                    yield index, position, one, *(() if shares is None else shares[position]), *name
            else:
                numbers = label if isinstance(label, list) else [label]
                ends = (end for number, half in zip(numbers, self.half_widths or ()) for end in (number - half, number + half))  # noqa: B905
                yield index, *numbers, *(shares or ()), *ends, *name


@click.command()
@click.option("--out", type=FILE, required=True, help="A file .onnx or .pt2 (torch.export).")
@click.option("--data", type=PATH, metavar="SHARD", help="Check it on this shard's test part, or on a table.")
@click.option("--with-samples", is_flag=True, help="Keep models that hold training samples (nearest neighbours).")
@model_place
@mapping_options
@allow_model_option
def export(
    out: Path, data: Path | None, with_samples: bool, place: ModelPlace, allow_models: tuple[str, ...], **mapping: Any
) -> None:
    """Write the finished model as a file for other programs. The file is run once and compared with the original."""
    where = place.home_of(data)
    folder = where.model
    from attune.fedclient.data import findings
    from attune.fedclient.data.new_samples import new_samples
    from attune.fedclient.data.shard import load_shard
    from attune.fedclient.data.table import may_be_table
    from attune.fedclient.model.artifact import Model
    from attune.fedclient.model.portable import export as write
    from attune.fedclient.read_options import ReadOptions

    whole, samples = Model.load(folder, allow_models=allow_models), None
    info, strange = whole.info, list[str]()
    if data is not None and data.is_file() and may_be_table(data):  # no label is needed
        options = ReadOptions.of(**mapping)
        new = new_samples([str(data)], info.model, info.column_names, info.missing_words, info.table_schema, options)
        samples, strange = new.x, list(new.notes)
    elif data is not None:
        shard = load_shard(data, options=info.options_for(data))
        samples, strange = shard.test_x, list(shard.warnings)
    findings.show({"": strange}, err=True)
    written = whole if with_samples else whole.without_samples()
    difference = write(written, out, samples)
    click.echo(f"{out}: probabilities differ from the original's by {difference:.1g} at most")
    if signer := where.sign(out):
        click.echo(f"signed as {signer}: `fedclient verify-model` checks it by {out.name}.signature.json")
    if left_out := sorted(set(whole.members) - set(written.members)):
        weight = sum(whole.members[name].weight for name in left_out)
        click.echo(
            f"left out, because they hold training samples: {', '.join(left_out)} ({weight:.0%} of the blend; the others are "
            "weighed again). --with-samples keeps them"
        )


@click.command()
@click.argument("place", type=click.Path(path_type=Path, exists=True), metavar="MODEL")
@click.option(
    "--authority", type=click.Path(path_type=Path, exists=True), required=True, metavar="PEM",
    help="ca.pem of the federation that must have signed it, or the home of a device there.",
)  # fmt: skip
@click.option(
    "--revoked", type=click.Path(path_type=Path, exists=True), metavar="EXPORT",
    help="A folder by `fedserver export`: what devices revoked there have signed does not count.",
)  # fmt: skip
def verify_model(place: Path, authority: Path, revoked: Path | None) -> None:
    """Check who signed a model's folder, an exported file or a server's export, and that no byte has changed."""
    from attune.common.identity.credential import short_form
    from attune.common.identity.signed_files import revoked_in, verify

    pem = (authority / "identity" / "ca.pem" if authority.is_dir() else authority).read_bytes()
    said = verify(place, pem, revoked_in(revoked, pem) if revoked else ())
    when = datetime.fromtimestamp(said.signed_at, timezone.utc)
    who = f"signed by {said.signer or 'the authority'} of federation {short_form(pem)} on {when:%Y-%m-%d %H:%M} UTC"
    click.echo(f"{place}: {who}; {len(said.files)} files are unchanged")
    if not revoked and said.signer:
        click.echo("whether that device was revoked is not checked: --revoked EXPORT does")
