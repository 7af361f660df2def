"""`docs/format.md` against the code: a reader written from the document finds what was written."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

import expstore
from expstore.errors import FormatError
from expstore.schema import Field, Schema
from expstore.storage.layout import canonical_json, chunk_rows, most_rows, shard_rows
from tests.format_reader import FormatReader, canonical

DOCUMENT = (Path(__file__).parents[1] / "docs/format.md").read_text()

SCHEMA = Schema(
    {
        "observation/image": Field((2, 3), "uint8"),
        "observation/frame": Field((40, 30), "uint8"),
        "observation/état.x": Field((), "bfloat16"),
        "observation/état/y": Field((5,), "float32"),
        "action": Field((2,), "float16"),
        "reward": Field((2,), "float32", has_next=True),
        "terminated": Field((), "bool"),
        "index": Field((), "int64"),
        "observation/points": Field((3,), "float32", ragged=True),
        "note": Field((), "text"),
    }
)
CODED = ("observation/frame", "observation/points")


def episode(rng: np.random.Generator, num_steps: int, *, final: bool) -> dict[str, Any]:
    """Random bytes: NaN, infinities and negative zeros come along."""

    def column(name: str, extra: int = 0) -> Any:
        field = SCHEMA[name]
        if field.dtype == "bool":
            return np.zeros(num_steps, bool)
        if name == "reward":
            return rng.choice([0.1, -0.0, np.nan], (num_steps, 2)).astype(np.float32)
        if name == "observation/frame":
            return rng.integers(0, 2, (num_steps + extra, 40, 1), np.uint8).repeat(30, axis=2)
        if field.dtype == "text":
            return ["é" * length for length in rng.integers(0, 4, num_steps)]
        if field.ragged:
            lengths = rng.integers(0, 4, num_steps + extra)
            return [rng.normal(size=(length, 3)).astype(np.float32) for length in lengths]
        data = rng.bytes((num_steps + extra) * field.step_bytes)
        array = np.frombuffer(data, field.stored_dtype).reshape(-1, *field.shape)
        if field.dtype == "bfloat16":
            return array.view(pytest.importorskip("ml_dtypes").bfloat16)
        return array

    extra = {name: int(final and name.startswith("observation")) for name in SCHEMA.fields}
    return {name: column(name, extra[name]) for name in SCHEMA.fields}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several commits, more than one file per column, every kind of next value and metadata."""
    found = tmp_path_factory.mktemp("format") / "a.exp"
    rng = np.random.default_rng(7)
    layout = dict.fromkeys(CODED, "coded")
    with expstore.Writer(
        found, schema=SCHEMA, chunk_steps=1024, layout=layout, commit_interval_s=3600
    ) as writer:
        writer.append(episode(rng, 1100, final=True), seed=3, policy="é\U0001f600", n=float("nan"))
        writer.append(episode(rng, 1, final=False))
        writer.commit()
        gaps = episode(rng, 700, final=False)
        following = np.concatenate([gaps["reward"][1:], gaps["reward"][:1]])
        following[[3, 500]] = 5
        ended = np.arange(700) == 699
        writer.append(
            {**gaps, "terminated": ended, "next_reward": following}, seed="no number", x=[1, None]
        )
        writer.append(episode(rng, 2, final=True), end_reason="incomplete", seed=0)
    return found


def as_bytes(rows: Any) -> list[bytes]:
    """One entry per step, whether its values are arrays, numbers or text."""
    return [row.encode() if isinstance(row, str) else row.tobytes() for row in rows]


def test_a_reader_written_from_the_document_reads_every_column(path: Path) -> None:
    store, reader = expstore.open(path), FormatReader(path)
    names = [*store.fields, "done", "episode"]
    found = store.read(np.arange(store.num_steps), names)

    for name in names:
        expected: Any = found
        for part in name.split("/"):
            expected = expected[part]
        if name in reader.fields:
            assert as_bytes(reader.column(name, f"steps/{name}")) == as_bytes(expected), name
        else:
            assert reader.array(f"steps/{name}").tobytes() == expected.tobytes(), name
    assert reader.array("steps/observation/image").shape == (1803, 2, 3)
    assert len(list((path / "steps/reward").glob("c.*"))) > 1


def test_a_reader_written_from_the_document_reads_every_next_value(path: Path) -> None:
    store, reader = expstore.open(path), FormatReader(path)
    steps = np.arange(store.num_steps)

    for name in store.fields:
        values, _ = reader.next_values(name)
        expected: Any = store.read(steps, [f"next_{name}"])
        for part in f"next_{name}".split("/"):
            expected = expected[part]
        assert as_bytes(values) == as_bytes(expected), name
    assert reader.has_next().tolist() == store.read(steps, ["has_next"])["has_next"].tolist()
    assert np.flatnonzero(~reader.has_next()).tolist() == [1099, 1100, 1800, 1802]


def test_a_reader_written_from_the_document_reads_the_episode_index(path: Path) -> None:
    store, reader = expstore.open(path), FormatReader(path)

    assert reader.array("episodes/start").tolist() == [0, 1100, 1101, 1801]
    assert reader.array("episodes/length").tolist() == [1100, 1, 700, 2]
    assert reader.end_reasons() == ["cut", "cut", "terminated", "incomplete"]
    assert reader.seeds() == [3, None, None, 0]
    assert reader.array("episodes/return").tobytes() == store.episodes["return"].tobytes()
    assert repr(reader.metadata()) == repr(store.episodes["metadata"])
    assert reader.metadata()[1:] == [{}, {"seed": "no number", "x": [1, None]}, {}]


def test_every_checksum_is_what_the_document_says(path: Path) -> None:
    reader = FormatReader(path)

    for field in reader.fields:
        stored = reader.array(f"episodes/crc32c/{field}").tolist()
        assert reader.field_checksums(field) == stored, field
    assert reader.index_checksums() == reader.array("episodes/index_crc32c").tolist()


def test_the_history_names_every_commit(path: Path) -> None:
    reader = FormatReader(path)

    assert [entry["number"] for entry in reader.history()] == [0, 1, 2, 3]
    commit = reader.expstore["commit"]
    assert reader.history()[-1] == commit


def test_a_store_without_a_schema_has_two_dimensions_and_no_arrays(tmp_path: Path) -> None:
    expstore.Writer(tmp_path / "a.exp").close()

    reader = FormatReader(tmp_path / "a.exp")
    assert reader.dims == {"step": [0, 0], "episode": [0, 0]}
    assert reader.members == {}


def test_the_tree_holds_what_the_document_names_and_nothing_else(path: Path) -> None:
    reader = FormatReader(path)
    arrays = {name for name, about in reader.members.items() if about["node_type"] == "array"}
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}

    private = {"lock", "holder", "commits", "writing", "root"}
    expected = {"zarr.json", *(f"__expstore/{name}" for name in private)}
    expected |= {f"{name}/zarr.json" for name in reader.members}
    chunks = {file for file in found - expected if Path(file).name.startswith("c.")}
    assert found == expected | chunks
    assert {str(Path(file).parent) for file in chunks} == arrays


def test_every_array_is_spelled_as_in_the_document(path: Path) -> None:
    """The template of section 4.1, filled in, is the metadata of each array."""
    (template,) = [
        block
        for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
        if '"node_type": "array"' in block
    ]
    keys = re.findall(r'^  "(\w+)":', template, re.MULTILINE)
    for name, about in FormatReader(path).members.items():
        if about["node_type"] == "array":
            codec: dict[str, Any] = {"name": "bytes"}
            if about["data_type"] not in ("bool", "uint8"):
                codec["configuration"] = {"endian": "little"}
            places = ("steps/{}", "next/{}/value", "steps/{}/values", "next/{}/value/values")
            is_coded = name in {place.format(field) for place in places for field in CODED}
            assert list(about) == keys
            assert about["codecs"] == (sharding(about, codec) if is_coded else [codec]), name
            assert about["fill_value"] == (False if about["data_type"] == "bool" else 0)
            assert about == json.loads((path / name / "zarr.json").read_bytes())


def sharding(about: dict[str, Any], first: dict[str, Any]) -> list[dict[str, Any]]:
    """The codecs of section 6.2, filled in."""
    (template,) = [
        block
        for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
        if block.startswith('[{"name": "sharding_indexed"')
    ]
    inner_rows = about["codecs"][0]["configuration"]["chunk_shape"][0]
    shape = ", ".join(map(str, [inner_rows, *about["shape"][1:]]))
    filled: list[dict[str, Any]] = json.loads(template.replace("<R>, <shape of one row>...", shape))
    filled[0]["configuration"]["codecs"][0] = first
    return filled


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("steps/observation/image", ["step", "observation/image[1]", "observation/image[2]"]),
        ("next/reward/value", ["next/reward", "reward[1]"]),
        ("next/reward/step", ["next/reward"]),
        ("episodes/return", ["episode", "reward[1]"]),
        ("steps/observation/points/end", ["step"]),
        (
            "steps/observation/points/values",
            ["observation/points/values", "observation/points[1]"],
        ),
        ("steps/note/values", ["note/values"]),
        ("next/observation/points/value/end", ["next/observation/points"]),
        (
            "next/observation/points/value/values",
            ["next/observation/points/values", "observation/points[1]"],
        ),
        ("episodes/metadata/end", ["episode"]),
        ("episodes/metadata/values", ["episode/metadata/values"]),
    ],
)
def test_dimensions_are_named_as_in_the_document(
    path: Path, name: str, dimensions: list[str]
) -> None:
    assert FormatReader(path).members[name]["dimension_names"] == dimensions


def test_bfloat16_is_marked_and_index_can_be_a_field(path: Path) -> None:
    members = FormatReader(path).members

    assert members["steps/observation/état.x"]["data_type"] == "uint16"
    assert members["steps/observation/état.x"]["attributes"] == {"dtype": "bfloat16"}
    assert members["episodes/crc32c/index"]["data_type"] == "uint32"


def test_members_of_a_group_stand_together(path: Path) -> None:
    names = list(FormatReader(path).members)
    parents = [name.rpartition("/")[0] for name in names]

    for depth in range(4):
        order = [p for p, name in zip(parents, names, strict=True) if name.count("/") == depth]
        changes = 1 + sum(a != b for a, b in pairwise(order))
        assert changes == len(set(order)), order


@pytest.mark.parametrize(
    "document",
    [
        {"b": 1, "a": [1, 2.0, 1796075580.9367895, 1796075580.0, True, None]},
        {"é": '\x00\x1f\x7f"\\\b\t\n\f\r/<', "\U0001f600": "\uffff", "\uffff": "\u2028"},
    ],
)
def test_canonical_json_is_spelled_as_in_the_document(document: Any) -> None:
    assert canonical_json(document) == canonical(document).encode()


def test_a_root_edited_by_hand_is_refused(path: Path, tmp_path: Path) -> None:
    root = tmp_path / "zarr.json"
    shutil.copy(path / "zarr.json", root)
    root.write_text(root.read_text().replace('"step":[0,1803]', '"step":[0,1802]', 1))

    with pytest.raises(FormatError, match="fails its checksum"):
        expstore.open(tmp_path)


def rows_of_the_document(row_bytes: int, most: int) -> int:
    """The rule of section 6 in the words of the document."""
    limit = (256 if row_bytes >= 64 * 1024 else 32) * 2**20
    rows = max(1, *(2**k for k in range(32) if 2**k <= most and 2**k * row_bytes <= limit), 1)
    page = 4096 // max(2**k for k in range(13) if row_bytes % 2**k == 0)
    return int(page if rows < page and page * row_bytes <= limit else rows)


@pytest.mark.parametrize("most", [1, 16, 65_536, 1 << 20])
def test_chunks_are_sized_as_in_the_document(most: int) -> None:
    sizes = [*range(1, 300), 12_288, 29_403, 65_535, 65_536, 65_537, 196_608, 1 << 25, 1 << 31]
    for row_bytes in sizes:
        assert chunk_rows(row_bytes, most) == rows_of_the_document(row_bytes, most), row_bytes


@pytest.mark.parametrize("most", [1, 16, 65_536])
def test_shards_are_sized_as_in_the_document(most: int) -> None:
    """The rule of section 6.2 in the words of the document."""

    def power(number: int) -> int:
        return max(1 << k for k in range(40) if 1 << k <= max(1, number))

    for row_bytes in [*range(1, 300), 1024, 7056, 12_288, 29_403, 1 << 18, 1 << 20, 1 << 24]:
        inner = power(min(max(64, 2**17 // row_bytes), max(16, 2**19 // row_bytes)))
        while inner > 1 and inner * row_bytes > 2**22:
            inner //= 2
        inner = min(inner, most)
        shard = max(power(min(most, 2**26 // row_bytes)), inner)
        assert shard_rows(row_bytes, most) == (shard, inner), row_bytes


def test_the_table_of_chunks_is_right() -> None:
    rows = re.findall(r"^\| .*?\((\d[\d,]*) bytes\) \| ([\d,]+) \|", DOCUMENT, re.MULTILINE)
    assert len(rows) == 4
    for row_bytes, expected in rows:
        found = chunk_rows(int(row_bytes.replace(",", "")))
        assert found == int(expected.replace(",", "")), row_bytes


@pytest.mark.parametrize("steps", [0, 10**6, 10**8, 10**9])
def test_a_size_hint_makes_larger_chunks(steps: int) -> None:
    assert most_rows(None, steps) == max(65_536, 2 ** (steps // 256).bit_length())


def test_the_worked_example_is_right(tmp_path: Path) -> None:
    """Every number of section 15 is found in a store written so."""
    with expstore.Writer(tmp_path / "a.exp") as writer:
        observation = np.array([[1.0], [2.0], [3.0]], np.float32)
        writer.append({"observation": observation, "reward": [0.5, 0.25]}, seed=7, policy="a")
    reader = FormatReader(tmp_path / "a.exp")
    example = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", DOCUMENT.split("## 15")[1], re.MULTILINE))

    def number(key: str) -> int:
        return int(example[key].strip("`"), 16)

    (file,) = (tmp_path / "a.exp/steps/observation").glob("c.*")
    assert example["`steps/observation`"] == (
        f"`{file.read_bytes()[:8].hex(' ')}`; the file has {file.stat().st_size:,} bytes"
    )
    assert reader.array("next/observation/step").tolist() == [1]
    assert reader.array("next/observation/value").tobytes().hex(" ") == "00 00 40 40"
    assert number("CRC of the rows of `observation`") == google_crc32c.value(file.read_bytes()[:8])
    (over,) = [key for key in example if key.startswith("CRC of its exceptions")]
    exceptions = bytes.fromhex(re.findall("`(.*?)`", over)[0])
    assert number(over) == google_crc32c.value(exceptions)
    for name in ("crc32c/observation", "crc32c/reward", "index_crc32c"):
        assert [number(f"`episodes/{name}`")] == reader.array(f"episodes/{name}").tolist()
    assert reader.metadata_bytes() == [b'{"policy":"a"}']
    assert reader.array("episodes/metadata/end").tolist() == [14]
    assert reader.array("episodes/return").tolist() == [0.75]
    assert example["`dims`"].strip("`") == canonical(reader.dims)
    assert google_crc32c.value(b"123456789") == 0xE3069283


def test_every_section_that_other_files_name_is_there() -> None:
    sections = re.findall(r"^## (\d+)\. ", DOCUMENT, re.MULTILINE)
    assert sections == [str(n) for n in range(1, 17)]
    for number in re.findall(r"\(section (\d+)\)", DOCUMENT):
        assert number in sections


def test_other_readers_see_what_the_table_of_section_14_says(path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    tensorstore = pytest.importorskip("tensorstore")
    xarray = pytest.importorskip("xarray")
    reader = FormatReader(path)
    rewards, images = reader.array("steps/reward"), reader.array("steps/observation/image")

    group = zarr.open_group(path, mode="r")
    array = zarr.open_array(path / "steps/reward", mode="r")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/steps/reward/"}}
    tensor = tensorstore.open(spec, read=True).result()
    steps = xarray.open_zarr(path, group="steps")
    nested = xarray.open_zarr(path, group="steps/observation")

    for found in (group["steps/reward"][:], array[:], tensor.read().result(), steps["reward"]):
        assert np.asarray(found).tobytes() == rewards.tobytes()
    assert np.asarray(nested["image"]).tobytes() == images.tobytes()
    assert steps.sizes["step"] == nested.sizes["step"] == 1803
    frames = reader.array("steps/observation/frame")
    assert group["steps/observation/frame"][:].tobytes() == frames.tobytes()
