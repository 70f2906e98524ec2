"""Reads what Weights & Biases keeps of runs that it has not sent: a log of records in blocks of 32 KiB."""

import json
import struct

from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, HEADER = 32768, 7, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def records(path):
    data, at, held = path.read_bytes(), FILE_HEADER, b""
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        held += data[at + HEADER.size : at + HEADER.size + size]
        at += HEADER.size + size
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            yield record
            held = b""


def offline_runs(folder):
    """(run id, project, rows) of each, in the order of their beginning."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        found = list(records(path))
        [run] = [record.run for record in found if record.WhichOneof("record_type") == "run"][:1]
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in found
            if record.WhichOneof("record_type") == "history"
        ]
        yield run.run_id, run.project, rows
