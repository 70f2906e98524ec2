"""A worker of an engine server, as its transfer engine is: `-m tests.system.transfer_worker ADDRESS NAME RANK SIZE`.

It writes what it got to stdout, a line of JSON; with a number behind, it says so after as many tensors and waits."""

import json
import sys

import torch

from manege.engine.weight_wire import Receiver


def main() -> None:
    """Exit code 3 and the reason when it got nothing."""
    address, name, rank, size, *stops = sys.argv[1:]
    got = {}
    try:
        receiver = Receiver(address, name, rank=int(rank), size=int(size), device=torch.device("cpu"))
        for key, tensor in receiver.tensors():
            got[key] = [str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()]
            if stops and len(got) == int(stops[0]):
                print("stops", flush=True)
                sys.stdin.readline()
        receiver.close()
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}))
        raise SystemExit(3) from None
    print(json.dumps(got))


main()
