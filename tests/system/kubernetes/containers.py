"""Containers as processes of this machine: bubblewrap gives each its own PID namespace (its command is PID 1, and all
die with it), the pod's volumes at their paths and a private /tmp; programs, files and network are the machine's.
"""

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import httpx

from tests.system.kubernetes.cluster import built

_OWN = ("dev", "proc", "run", "tmp", "var")
_VARIABLE = re.compile(r"\$(?:\$|\((\w+)\))")
_MESSAGE_LIMIT = 4096
_LOG_MESSAGE_LIMIT = 2048


class NotReady(Exception):
    """A container cannot be made yet: a Secret or ConfigMap that it names is not there."""


def bubblewrap():
    """The machine's, else the one that lies with Kubernetes."""
    return shutil.which("bwrap") or str(built() / "root/usr/bin/bwrap")


class Container:
    """One container of a pod; `await start()`, then `await ended()`."""

    def __init__(self, spec, pod, folder):
        self.spec, self._pod = spec, pod
        self.log = folder / f"{spec['name']}.log"
        self._message = folder / f"{spec['name']}.message"
        self._volumes = folder / "volumes"
        self._process = None
        self._pid = None
        self.reason = None
        """Said instead of what the exit code says."""

    async def start(self, api):
        """Raises NotReady."""
        variables = await _environment(self.spec, self._pod, api)
        await self._fill_volumes(api)
        command = [_expand(word, variables) for word in [*self.spec.get("command", []), *self.spec.get("args", [])]]
        self._message.write_text("")
        told, telling = os.pipe()
        try:
            with self.log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._box(variables, telling),
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(telling,),
                    start_new_session=True,
                )
        finally:
            os.close(telling)
        self._pid = await asyncio.to_thread(_child, told)

    async def ended(self):
        """The container's terminated state, less its times."""
        code = await self._process.wait()
        code = 128 - code if code < 0 else code
        text = self._message.read_bytes()[:_MESSAGE_LIMIT].decode(errors="replace")
        if not text and code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            text = self.log.read_bytes()[-_LOG_MESSAGE_LIMIT:].decode(errors="replace")
        state = {"exitCode": code, "reason": self.reason or ("Error" if code else "Completed")}
        return {**state, "message": text} if text else state

    @property
    def is_running(self):
        return self._process is not None and self._process.returncode is None

    async def gone(self):
        """Return once no process of it is left."""
        if self._process is not None:
            await self._process.wait()

    def send(self, number):
        """To the container's PID 1, which ignores what it has no handler for, save SIGKILL."""
        if not self.is_running or self._pid is None:
            return
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            pass

    def _box(self, variables, telling):
        words = [bubblewrap(), "--die-with-parent", "--unshare-pid"]
        words += ["--as-pid-1", "--info-fd", str(telling), "--proc", "/proc", "--dev", "/dev"]
        words += ["--tmpfs", "/tmp", "--tmpfs", "/var", "--tmpfs", "/run"]
        for entry in Path("/").iterdir():
            if entry.name in _OWN:
                continue
            if entry.is_symlink():
                words += ["--symlink", os.readlink(entry), str(entry)]
            else:
                words += ["--ro-bind", str(entry), str(entry)]
        for needed in (Path(__file__).parents[3], Path(sys.prefix), *self._pod.readable):
            words += ["--ro-bind", str(needed), str(needed)]
        for mount in self.spec.get("volumeMounts", []):
            kind = "--ro-bind" if mount.get("readOnly") else "--bind"
            words += [kind, str(self._volumes / mount["name"] / mount.get("subPath", "")), mount["mountPath"]]
        words += ["--bind", str(self._message), self.spec.get("terminationMessagePath", "/dev/termination-log")]
        words += ["--chdir", self.spec.get("workingDir", "/"), "--clearenv"]
        given = {"PATH": os.defpath, "HOSTNAME": self._pod.name, **self._pod.service, **variables}
        for name, value in given.items():
            words += ["--setenv", name, value]
        return [*words, "--"]

    async def _fill_volumes(self, api):
        for volume in self._pod.spec.get("volumes", []):
            folder = self._volumes / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            for kind, key, field in (("secret", "secretName", "secrets"), ("configMap", "name", "configmaps")):
                if kind in volume:
                    values = await _values(api, self._pod.namespace, field, volume[kind][key])
                    paths = {item["key"]: item["path"] for item in volume[kind].get("items", [])}
                    _place(folder, {paths.get(name, name): values[name] for name in paths or values})


def _place(folder, files):
    """As a kubelet does it, so that all files of a volume can change at once: they are links into a hidden folder."""
    (folder / "..data").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "..data" / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))


def _child(told):
    """The command's process, as bubblewrap says it; None if it could not be made."""
    with open(told, "rb") as pipe:
        text = pipe.read()
    return json.loads(text)["child-pid"] if text else None


async def _environment(spec, pod, api):
    values = {}
    for source in spec.get("envFrom", []):
        for kind, field in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
            if kind in source:
                found = await _values(api, pod.namespace, field, source[kind]["name"])
                values |= {source.get("prefix", "") + name: value.decode() for name, value in found.items()}
    for entry in spec.get("env", []):
        values[entry["name"]] = _expand(await _value(entry, pod, api), values)
    return values


async def _value(entry, pod, api):
    source = entry.get("valueFrom")
    if source is None:
        return entry.get("value", "")
    if "fieldRef" in source:
        return pod.field(source["fieldRef"]["fieldPath"])
    for kind, field in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if kind in source:
            found = await _values(api, pod.namespace, field, source[kind]["name"])
            return found[source[kind]["key"]].decode()
    raise AssertionError(f"this kubelet has no such source of a value: {source}")


async def _values(api, namespace, field, name):
    try:
        found = await api.get(f"/api/v1/namespaces/{namespace}/{field}/{name}")
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 404:
            raise NotReady(f"{field} {name!r} not found") from error
        raise
    data = found.get("data", {})
    if field == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    return {key: value.encode() for key, value in data.items()}


def _expand(text, variables):
    """`$(NAME)` is replaced where there is such a variable, and `$$` is a dollar."""
    return _VARIABLE.sub(lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]), text)


KILL, TERMINATE = signal.SIGKILL, signal.SIGTERM
