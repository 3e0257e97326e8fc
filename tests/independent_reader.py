"""A reader of run directories that was written from docs/format.md alone, with nothing but `json` and `numpy`.

It imports neither unbroken nor torch, safetensors or xxhash, and so does not check digests: it shows that the page says
enough to get every number out. Dtypes that NumPy lacks come as their bits: bfloat16 as uint16, float8 as uint8.
"""

import base64
import json
import re
import struct
from pathlib import Path

import numpy as np

BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
STEP = re.compile(r"step-(0|[1-9]\d*)(?:\.([1-9]\d*))?")
MANIFEST = re.compile(r"manifest(?:\.g\d+)?\.json")
RECORD = re.compile(r"\d{4,}\.json")


def record(path: Path) -> dict:
    """The body of a record."""
    envelope = json.loads(path.read_text())
    assert envelope["format"] == "unbroken" and envelope["version"] in (1, 2, 3)
    return envelope["body"]


def newest(run: Path) -> Path:
    """The manifest that a start of the job would restore."""
    records = [record(path) for path in (run / "generations").iterdir() if RECORD.fullmatch(path.name)]
    tip = max(records, key=lambda generation: generation["number"])
    found = []
    for directory in run.iterdir():
        if STEP.fullmatch(directory.name):
            found += [path for path in directory.iterdir() if MANIFEST.fullmatch(path.name)]
    return max((path for path in found if on_lineage(record(path), tip)), key=place)


def on_lineage(manifest: dict, tip: dict) -> bool:
    at = (manifest["step"], manifest["micro_step"])
    return manifest["generation"] == tip["number"] or any(
        origin["generation"] == manifest["generation"] and at <= (origin["step"], origin["micro_step"])
        for origin in tip["lineage"]
    )


def place(path: Path) -> tuple:
    manifest = record(path)
    return (manifest["step"], manifest["micro_step"], manifest["generation"])


def read(manifest_path: Path, rank: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """What `rank` restores: tensors by name, decoded values by registered name."""
    manifest = record(manifest_path)
    described = manifest["tensors"] | manifest["rank_tensors"][rank]
    directory = manifest_path.parent
    tensors = {
        name: tensor(directory, manifest["files"], pieces_of(directory, manifest["files"], name, entry))
        for name, entry in described.items()
    }
    values = {}
    for name, records in manifest["values"].items():
        for entry in records:
            if any(first <= rank <= last for first, last in entry["ranks"]):
                values[name] = decode(entry["value"], tensors)
    return tensors, values


def pieces_of(directory: Path, files: list, name: str, entry: dict) -> dict:
    """The entry with its pieces, which for a tensor with `cuts` are those of its name in all headers."""
    if "cuts" not in entry:
        return entry
    pieces = []
    for index, file in enumerate(files):
        with (directory / file["name"]).open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        for stored_as, place in header.items():
            box = re.fullmatch(re.escape(name) + r"(?:\[(.*)\])?", stored_as)
            if box:
                begin, end = (8 + length + offset for offset in place["data_offsets"])
                ranges = [[int(at) for at in part.split(":")] for part in (box[1] or "").split(",") if part]
                pieces.append({"file": index, "begin": begin, "end": end, "box": ranges or None})
    return entry | {"pieces": pieces}


def tensor(directory: Path, files: list, entry: dict) -> np.ndarray:
    dtype = np.dtype(BITS.get(entry["dtype"], entry["dtype"]))
    whole = np.empty(entry["shape"], dtype)
    filled = 0
    for piece in entry["pieces"]:
        box = piece["box"] if piece["box"] is not None else [[0, length] for length in entry["shape"]]
        with (directory / files[piece["file"]]["name"]).open("rb") as file:
            file.seek(piece["begin"])
            data = np.frombuffer(file.read(piece["end"] - piece["begin"]), dtype.newbyteorder("<"))
        part = tuple(slice(begin, end) for begin, end in box)
        whole[part] = data.reshape([end - begin for begin, end in box])
        filled += data.size
    assert filled == whole.size
    return whole


def decode(value, tensors):
    """Typed JSON -> a value. Classes that are named come as (name, member or fields): nothing is imported."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind = value["$"]
    if kind == "int":
        return int(value["hex"], 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
    if kind == "complex":
        return complex(decode(value["real"], tensors), decode(value["imag"], tensors))
    if kind in ("bytes", "bytearray"):
        return base64.b64decode(value["base64"])
    if kind in ("tuple", "set", "frozenset", "deque"):
        items = [decode(item, tensors) for item in value["items"]]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}.get(kind, list)(items)
    if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
        return {decode(key, tensors): decode(item, tensors) for key, item in value["pairs"]}
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "array":
        flat = tensors[value["name"]].reshape(-1).tobytes()
        return np.frombuffer(flat, np.dtype(value["dtype"])).reshape(value["shape"], order=value["order"])
    if kind == "numpy-scalar":
        return np.frombuffer(base64.b64decode(value["base64"]), np.dtype(value["dtype"]))[0]
    if kind == "enum":
        return (value["class"], value["member"])
    if kind in ("dataclass", "namedtuple"):
        return (value["class"], {name: decode(item, tensors) for name, item in value["fields"].items()})
    if kind == "size":
        return tuple(value["shape"])
    if kind == "date":
        return value["iso"]
    return value.get("text", value.get("name"))
