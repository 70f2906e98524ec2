"""Container images of the tests' own, as archives that containerd imports: busybox with all its programs, and on
request the Python that runs the tests, with its standard library and what its extension modules link to.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

PYTHON = "/python/bin/python3"
_FOLDERS = ("bin", "dev", "etc", "proc", "sys", "tmp", "root")
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "tkinter",
    "turtledemo",
}


def build(path, name, *, busybox, files=(), with_python=False, command=("sh",)):
    """Write the image NAME. `files`: pairs of the path inside and bytes. `command`: run where a pod names none."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tree:
        for folder in _FOLDERS:
            _add(tree, folder, kind=tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755)
        _add(tree, "bin/busybox", busybox.read_bytes(), mode=0o755)
        applets = subprocess.run([busybox, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        for applet in applets:
            if applet != "busybox":
                _add(tree, f"bin/{applet}", kind=tarfile.SYMTYPE, target="busybox")
        if with_python:
            _add_python(tree)
        for inside, content in files:
            _add(tree, inside.lstrip("/"), content)
    _archive(path, name, layer.getvalue(), command)


def _add(tree, inside, content=b"", *, kind=tarfile.REGTYPE, mode=0o644, target=""):
    entry = tarfile.TarInfo(inside)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(content)
    tree.addfile(entry, io.BytesIO(content))


def _add_python(tree):
    """The interpreter as `PYTHON`, and libraries where its loader looks for them."""
    program = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    standard = Path(sysconfig.get_path("stdlib"))
    extensions = sorted(standard.glob("lib-dynload/*.so"))
    _add(tree, PYTHON.lstrip("/"), program.read_bytes(), mode=0o755)
    for found in sorted(standard.rglob("*")):
        parts = found.relative_to(standard).parts
        if found.is_file() and not _LEFT_OUT & set(parts) and not parts[0].startswith("config-"):
            _add(tree, f"python/lib/{standard.name}/{found.relative_to(standard)}", found.read_bytes())
    for library in _libraries([program, *extensions]):
        _add(tree, str(library).lstrip("/"), library.read_bytes(), mode=0o755)


def _libraries(programs):
    """What the loader of this machine would load for them, at the paths where it finds it."""
    told = subprocess.run(["ldd", *programs], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted({Path(found) for found in re.findall(r"(/\S+) \(0x", told)})


def _archive(path, name, layer, command):
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin:/python/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [],
    }
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    layer_name = f"{digest}/layer.tar"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]).encode()
    with tarfile.open(path, "w") as archive:
        for member, content in ((config_name, text), (layer_name, layer), ("manifest.json", manifest)):
            _add(archive, member, content)
