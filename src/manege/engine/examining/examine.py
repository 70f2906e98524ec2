"""What a server can do for us, as findings, and the mode that follows: token ids, messages, or none.

Nothing is taken from what a server claims where it can be tried: token ids are sampled from, log-probabilities compared
at two temperatures, chat answers read as the gateway reads them. The server is left as it was found.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from manege.engine.examining.chat import examine_chat
from manege.engine.examining.identity import Identity, identify
from manege.engine.examining.peek import Finding, Peek
from manege.engine.examining.tokens import TEXT, examine_tokenizer, examine_tokens, examine_weights
from manege.errors import EngineAwayError
from manege.model.folder import ModelFolder
from manege.types import EngineWire

__all__ = ["Finding", "Verdict", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from the findings."""

    mode: str | None
    """`tokens`, `messages` or None, as in a registration of an engine."""
    wire: EngineWire
    url: str
    can_train: bool
    """It can be given new weights."""
    options: Sequence[str]
    """For its command line or environment, that would make it do more."""

    def __str__(self) -> str:
        how = f'gateway.engine_url = "{self.url}"' + (f', engine_wire = "{self.wire}"' if self.wire != "vllm" else "")
        match self.mode:
            case "tokens" if self.can_train:
                return f"mode tokens: {how}"
            case "tokens":
                return f"mode tokens, for evaluation only, since its weights cannot be changed: {how}"
            case "messages":
                return 'mode messages: register it with POST /api/models, mode "messages"'
        return "no mode of ours: nothing that it samples can be learnt from"


async def examine(url: str, folder: ModelFolder | None) -> AsyncIterator[Finding | Verdict]:
    """Findings, then one Verdict. `folder`: of the model that it should serve."""
    async with Peek(url) as peek:
        examination = _Examination(peek, folder)
        try:
            async for finding in examination.findings():
                yield finding
        except EngineAwayError as error:
            examination.mode = None
            yield Finding(False, str(error))
        yield examination.verdict()


class _Examination:
    def __init__(self, peek: Peek, folder: ModelFolder | None) -> None:
        self.mode: str | None = None
        self._peek, self._folder = peek, folder
        self._wire: EngineWire = "vllm"
        self._can_train = False
        self._options: list[str] = []

    async def findings(self) -> AsyncIterator[Finding]:
        server = await identify(self._peek)
        if isinstance(server, Finding):
            yield server
            return
        self._wire = server.wire
        yield Finding(True, f"{server.name} at {self._peek.url}, model {server.model}")
        yield self._noted(_context(server, self._folder))
        async for finding in self._tokens(server):
            yield self._noted(finding)
        async for finding in self._chat(server):
            yield finding

    def verdict(self) -> Verdict:
        options = list(dict.fromkeys(self._options))
        return Verdict(mode=self.mode, wire=self._wire, url=self._peek.url, can_train=self._can_train, options=options)

    async def _tokens(self, server: Identity) -> AsyncIterator[Finding]:
        findings: list[Finding] = []
        async for finding in examine_tokens(self._peek, server):
            findings.append(finding)
            yield finding
        if findings[-1].ok is False:
            return
        if self._folder is not None:
            expected = self._folder.tokenizer.encode(TEXT, add_special_tokens=False).ids
            yield (same := await examine_tokenizer(self._peek, server, expected))
            if same.ok is False:
                return
        self.mode, self._can_train = "tokens", True
        async for finding in examine_weights(self._peek, server):
            self._can_train &= finding.ok is not False
            yield finding

    async def _chat(self, server: Identity) -> AsyncIterator[Finding]:
        findings = [finding async for finding in examine_chat(self._peek, server)]
        for finding in findings:
            if self.mode == "tokens":
                # The gateway reads and writes messages itself.
                yield Finding(None, f"not needed: {finding.text}")
            else:
                yield self._noted(finding)
        if self.mode is None and findings[0].ok and all(finding.ok is not False for finding in findings[:2]):
            self.mode = "messages"

    def _noted(self, finding: Finding) -> Finding:
        if finding.option:
            self._options.append(finding.option)
        return finding


def _context(server: Identity, folder: ModelFolder | None) -> Finding:
    if server.context_limit is None:
        return Finding(None, "it does not tell its context limit")
    if folder is None or server.context_limit >= folder.context_limit:
        return Finding(True, f"{server.context_limit} tokens of context")
    text = f"{server.context_limit} tokens of context, of {folder.context_limit} that the model has"
    return Finding(None, text, "--context-length N" if server.kind == "sglang" else "--max-model-len N")
